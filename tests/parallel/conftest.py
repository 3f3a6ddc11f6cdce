import sys
from pathlib import Path

for folder in ("learn", "unit"):  # test_learning; test_parallel, also for the ranks
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
