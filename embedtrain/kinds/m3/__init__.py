"""model.kind=m3: a vector, lexical weights and a vector per token (BGE-M3)."""

from embedtrain.config.kinds import Kind


class M3(Kind):
    """A vector, lexical weights and a vector per token (BGE-M3)."""

    name = "m3"
    summary = "a vector, lexical weights and a vector per token (BGE-M3)"
