"""`python -m minitext` is the command line."""

from minitext.cli.main import main

if __name__ == "__main__":
    main()
