"""Self-contained HTML pages with inline charts. They use a light or dark theme to match the reader's system."""
