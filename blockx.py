"""Launcher: ``python blockx.py --config config.yaml``. ``import blockx`` means the package."""

if __name__ == "__main__":
    from blockx.cli import main

    raise SystemExit(main())
