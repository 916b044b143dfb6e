"""`python -m minitext` is the command line."""

from minitext.cli import main

if __name__ == "__main__":
    main()
