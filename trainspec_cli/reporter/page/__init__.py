"""Self-contained HTML pages with inline charts; light or dark follows the reader's system."""
