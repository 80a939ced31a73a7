"""What others test, with logitless underneath: `make test-clients`."""
