"""Tasks of mteb, one of each kind, on a few dozen texts that are made on the spot."""

import random

from datasets import Dataset, DatasetDict
from mteb.mocks import mock_tasks
from mteb.mocks.mock_tasks.clustering import MockClusteringTask

SUBJECTS = {
    "cats": ["The cat", "A kitten", "My old tomcat", "Their pet"],
    "trains": ["The express", "A goods train", "The night train", "Our locomotive"],
    "bread": ["The baker", "Fresh sourdough", "A loaf of rye", "This oven"],
    "space": ["The rocket", "A distant galaxy", "The lunar probe", "An astronaut"],
}
ENDS = ["in the morning", "without a sound", "near the old harbour", "after a long winter", "for the third time"]
DOES = ["waits", "turns around", "is late again", "smells wonderful", "shines", "was seen", "falls asleep"]


def sentences(num: int, seed: int) -> tuple[list[str], list[int]]:
    """Sentences and the number of what each is about."""
    draw = random.Random(seed)
    kinds = [draw.randrange(len(SUBJECTS)) for _ in range(num)]
    names = list(SUBJECTS)
    texts = [
        f"{draw.choice(SUBJECTS[names[kind]])} {draw.choice(DOES)} {draw.choice(ENDS)} {row}"
        for row, kind in enumerate(kinds)
    ]
    return texts, kinds


def pairs() -> tuple[list[str], list[str], list[int]]:
    """Sentences, others, and whether both are about the same."""
    first, one = sentences(60, 1)
    second, other = sentences(60, 2)
    return first, second, [int(a == b) for a, b in zip(one, other, strict=True)]


def collection(*, reranking: bool) -> dict:
    """Queries, documents (some with a title, one twice), judgements, and candidates."""
    queries, of = sentences(13, 3)
    texts, about = sentences(70, 4)
    texts[5] = texts[4]
    draw = random.Random(5)
    gains = {
        f"q{q}": {f"d{d}": draw.randrange(1, 3) for d in range(70) if about[d] == of[q] and draw.random() < 0.5}
        for q in range(13)
    }
    titles = ["" if d % 3 else list(SUBJECTS)[about[d]] for d in range(70)]
    return {
        "corpus": Dataset.from_dict({"id": [f"d{d}" for d in range(70)], "title": titles, "text": texts}),
        "queries": Dataset.from_dict({"id": [f"q{q}" for q in range(13)], "text": queries}),
        "relevant_docs": gains,
        "top_ranked": {f"q{q}": [f"d{(q * 5 + i) % 70}" for i in range(7 + q)] for q in range(13)}
        if reranking
        else None,
    }


def table(**columns: list) -> DatasetDict:
    return DatasetDict({"test": Dataset.from_dict(columns)})


class Sts(mock_tasks.MockSTSTask):
    def load_data(self, num_proc=None, **_):
        first, second, same = pairs()
        self.dataset = table(sentence1=first, sentence2=second, score=[s + i / 100 for i, s in enumerate(same)])
        self.data_loaded = True


class PairClassification(mock_tasks.MockPairClassificationTask):
    def load_data(self, num_proc=None, **_):
        first, second, same = pairs()
        self.dataset = table(sentence1=first, sentence2=second, labels=same)
        self.data_loaded = True


class Bitext(mock_tasks.MockBitextMiningTask):
    def load_data(self, num_proc=None, **_):
        first, _, _ = pairs()
        self.dataset = table(sentence1=first, sentence2=[" ".join(text.split()[::-1]) for text in first])
        self.data_loaded = True


class Classification(mock_tasks.MockClassificationTask):
    def load_data(self, num_proc=None, **_):
        parts = {name: sentences(num, seed) for name, num, seed in (("train", 60, 6), ("test", 50, 7))}
        self.dataset = DatasetDict({k: Dataset.from_dict({"text": t, "label": y}) for k, (t, y) in parts.items()})
        self.data_loaded = True


class Multilingual(mock_tasks.MockMultilingualClassificationTask):
    def load_data(self, num_proc=None, **_):
        task = Classification()
        task.load_data()
        self.dataset = {"eng": task.dataset, "fra": task.dataset}
        self.data_loaded = True


class Clustering(MockClusteringTask):
    def load_data(self, num_proc=None, **_):
        groups = [sentences(40, seed) for seed in (8, 9)]
        self.dataset = table(sentences=[texts for texts, _ in groups], labels=[labels for _, labels in groups])
        self.data_loaded = True


class Retrieval(mock_tasks.MockRetrievalTask):
    def load_data(self, num_proc=None, **_):
        self.dataset = {"default": dict.fromkeys(("test", "val"), collection(reranking=False))}
        self.data_loaded = True


class Reranking(mock_tasks.MockRerankingTask):
    def load_data(self, num_proc=None, **_):
        self.dataset = {"default": {"test": collection(reranking=True)}}
        self.data_loaded = True


class Broken(mock_tasks.MockSTSTask):
    def load_data(self, num_proc=None, **_):
        raise ConnectionError("the Hub\ndoes not answer")


class Interrupted(Sts):
    def load_data(self, num_proc=None, **_):
        raise KeyboardInterrupt


KINDS = [Sts, PairClassification, Bitext, Classification, Multilingual, Clustering, Retrieval, Reranking]
