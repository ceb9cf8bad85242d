"""Layouts of training rows: FlagEmbedding, Tevatron, ms-swift, NeMo, BEIR, and columns by order."""

from embedtrain.data.sources.layouts.base import TEXTS_ONLY, DocumentLookup, RowLayout
from embedtrain.data.sources.layouts.columns import choose_layout

__all__ = ["TEXTS_ONLY", "DocumentLookup", "RowLayout", "choose_layout"]
