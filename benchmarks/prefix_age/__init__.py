"""`benchmarks.prefix_age`: what an older image prefix costs a vision-language-action policy."""
