"""The commands of `internvl-pack`, one module each: HELP, configure(parser), run(args) -> exit code."""
