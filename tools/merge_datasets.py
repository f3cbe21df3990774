"""Merge token files into one dataset, as if their texts had been preprocessed together.

    python tools/merge_datasets.py --input FOLDER --output-prefix P       every pair of .bin and .idx, in sorted order
    python tools/merge_datasets.py --input A B C --output-prefix P        these prefixes, in this order

The last line of standard output is the result as JSON. Failures print one `error:` line, leave no output and exit with 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from megalite.data.indexed import IndexedDataset
from megalite.data.merge import find_prefixes, merge
from megalite.errors import MegaliteError
from megalite.log import configure_logging


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="one folder, or prefixes in the order wanted")
    parser.add_argument("--output-prefix", required=True, metavar="P", help="writes P.bin, P.idx and P.meta.json")
    args = parser.parse_args(arguments)
    configure_logging(rank=0, world_size=1)
    begun = time.perf_counter()
    try:
        is_folder = len(args.input) == 1 and not Path(f"{args.input[0]}.idx").exists()
        prefixes = find_prefixes(Path(args.input[0])) if is_folder else list(args.input)
        meta = merge(prefixes, args.output_prefix)
        result = IndexedDataset(args.output_prefix)
    except (MegaliteError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 1
    for prefix in prefixes:
        print(f"merged {prefix}", file=sys.stderr)
    figures = {
        "inputs": prefixes,
        "output": args.output_prefix,
        "documents": len(result.document_indices) - 1,
        "sequences": len(result),
        "tokens": result.num_tokens,
        "dtype": result.dtype.name,
        "max_id": None if meta is None else meta.max_id,
        "bin_sha256": None if meta is None else meta.bin_sha256,
        "seconds": round(time.perf_counter() - begun, 3),
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
