"""How scikit-learn is called: with one thread, and without its warnings."""

import contextlib
import warnings
from collections.abc import Iterator

from threadpoolctl import threadpool_limits

# Of whatever is drawn, in any set and experiment: MTEB's.
SEED = 42


@contextlib.contextmanager
def fitting() -> Iterator[None]:
    """Fit and measure within it.

    The last bits of a product, and with them now and then a prediction, depend on the number of threads; launchers
    give one process all cores and several processes one each. What scikit-learn warns of (no convergence after so
    many iterations, a class that was never predicted) is the figures' own matter: they are what they are.
    """
    with warnings.catch_warnings(), threadpool_limits(limits=1):
        warnings.simplefilter("ignore")
        yield
