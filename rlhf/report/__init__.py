"""Pages of HTML that are readable without network: about a run, a comparison of runs, and answers side by side."""
