"""How often `trainspec diagnose` names the cause and the place of what was done to a run from outside.

    python -m tests.bench.diagnose --causes all --count 30 --seed 1 --out FILE

Nothing here imports the diagnosis or shares a threshold with it: a case is judged by what the command prints alone.
`cases` says what is injected and draws it, `injectors` does it to a live run (`processor`, `lab.hosts` and, within the
ranks, `inside/sitecustomize.py`), `trial` runs a case, `judge` compares, `matrix` counts.
"""
