import sys

from qurl.cli import main

sys.exit(main())
