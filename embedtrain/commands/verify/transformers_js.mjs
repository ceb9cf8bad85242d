// The outputs of the graph in transformers.js, which tokenizes in JavaScript; run by node.
import { readFileSync, writeFileSync } from 'node:fs';
import { basename, dirname } from 'node:path';
import { AutoModel, AutoModelForSequenceClassification, AutoTokenizer, Tensor, env } from '@huggingface/transformers';

const [requestPath, resultPath] = process.argv.slice(2);
const given = JSON.parse(readFileSync(requestPath, 'utf8'));
env.allowRemoteModels = false;
env.localModelPath = dirname(given.model);
const name = basename(given.model);
const tokenizer = await AutoTokenizer.from_pretrained(name);

// `truncation: true` would cut off the special tokens at the end of a text.
const [one, other] = ['a', 'b'].map((text) => tokenizer.encode(text));
let numLast = 0;
while (numLast < one.length && one.at(-1 - numLast) === other.at(-1 - numLast)) numLast += 1;

function tokenize(text) {
  const all = tokenizer.encode(text);
  const last = all.slice(all.length - numLast);
  const ids = [...all.slice(0, Math.min(all.length, tokenizer.model_max_length) - numLast), ...last];
  const tensor = (values) => new Tensor('int64', BigInt64Array.from(values, BigInt), [1, ids.length]);
  return { input_ids: tensor(ids), attention_mask: tensor(ids.map(() => 1)) };
}

const output = { version: env.version };
if (given.outputs.includes('scores')) {
  const model = await AutoModelForSequenceClassification.from_pretrained(name, { dtype: 'fp32' });
  const logits = [];
  for (const [query, document] of given.formatted_pairs) {
    logits.push((await model(tokenizer(query, { text_pair: document, truncation: true }))).logits.data[0]);
  }
  output.scores = { logits };
} else {
  const model = await AutoModel.from_pretrained(name, { dtype: 'fp32' });
  const text = [];
  for (const each of given.texts) text.push((await model(tokenize(each))).sentence_embedding.tolist()[0]);
  output.vectors = { text };
}
writeFileSync(resultPath, JSON.stringify(output));
