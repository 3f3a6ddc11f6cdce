"""The paper's tables and figures, each arm a recipe plus overrides.

    python -m benchmarks.paper.run table1 --model DIR --train FILE --test FILE --out DIR ...
    python -m benchmarks.paper          # redraw docs/results.md from the JSON (make tables)

`arms` says what is compared, `run` trains it, `results` is the JSON between the two halves, `page`
and the modules of tables and figures show it. `baseline` and `graders` check the accuracies.
"""
