"""Programs that use engines as their documentation does, run by the Python that the engine is installed in, or by node.

A program has the name of its engine; the short ones are functions of `libraries.py`. Each is started as
`python -I FILE REQUEST RESULT`, a program for node as `node - REQUEST RESULT` in the folder of its packages. It imports
nothing of this package, because that Python need not have it.

REQUEST is a JSON file with `engine`, its name, `model`, a directory, and `kind`, the name of the kind of model.
Those that encode texts also get `texts`, a list of strings; `prompts`, by role, `query` and `document`; `dimension` of
a vector, if texts have one; and for late interaction `token_vectors`, for clients that do not read these settings from
the directory: by role `max_length` in tokens, `expanded_length` (0: no expansion) and `skipped`, ids of tokens whose
vectors are left out unless they are the first of a text; besides these `expansion_id`, and `attend`, whether expansion
tokens are in the attention mask. Those that score pairs get `pairs` of query and document, for engines that apply
prompts and chat templates themselves, and `formatted_pairs`, the same with all texts that the tokenizer does not add.

The JSON file RESULT gets `version` and an output by way of encoding: `text` without a prompt, `query` and `document`
with the prompts. It has the ways that the engine has, and one or more parts of the output:

- `vectors`: a list of numbers for each text (dense, m3)
- `token_vectors`: a list of vectors for each text (late_interaction; m3, of all tokens but the first)
- `word_weights`: for each text {"indices": ids of tokens, "values": their weights} (sparse, m3)
- `scores` of a cross-encoder: a number for each pair, as `logits` or `activated` instead of a way of encoding

Of an engine that changes some texts before it computes, it also gets `changes`, what it does to them, and `changed`: by
way of encoding, or of scoring, the indices of these texts or pairs, which are not compared.

Instead of these it gets `unsupported`, a sentence, if this version of the engine has no such models.
"""
