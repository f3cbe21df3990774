"""From token files to batches. The loader is imported by its module name, because it alone needs torch."""

from megalite.data.gpt_dataset import GPTDataset
from megalite.data.indexed import IndexedDataset, best_dtype
from megalite.data.indexed_writer import IndexedDatasetWriter
from megalite.data.mock import MockDataset
from megalite.data.sample import Sample, SampleDataset
from megalite.data.splits import num_samples_per_split, split_ranges

__all__ = [
    "GPTDataset",
    "IndexedDataset",
    "IndexedDatasetWriter",
    "MockDataset",
    "Sample",
    "SampleDataset",
    "best_dtype",
    "num_samples_per_split",
    "split_ranges",
]
