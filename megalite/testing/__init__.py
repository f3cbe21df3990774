"""Running functions in several ranks on one machine; used by the tests and by the tools that compare layouts."""

from megalite.testing.rank_pool import RankError, RankFailure, RankPool, RankTimeout

__all__ = ["RankError", "RankFailure", "RankPool", "RankTimeout"]
