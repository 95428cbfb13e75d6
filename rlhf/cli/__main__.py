from rlhf.cli import main

main()
