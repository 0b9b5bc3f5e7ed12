"""Training, built on clcomm: data, engines, options, the loop, comparisons."""
