"""``python -m blockx``: the same command line as the installed ``blockx``. Main process, main thread."""

if __name__ == "__main__":
    from blockx.cli import main

    raise SystemExit(main())
