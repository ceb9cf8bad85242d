"""What a row's values mean, layout by layout: FlagEmbedding, columns by order, Tevatron, messages, BEIR."""

from embedtrain.data.formats.layouts.choose import choose_layout
from embedtrain.data.formats.layouts.layout import TEXTS_ALONE, Documents, Layout

__all__ = ["TEXTS_ALONE", "Documents", "Layout", "choose_layout"]
