# Everything runs from .venv, which `make venv` builds once; `make demo` and `make test` build it when it is missing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ARGS   ?=

.PHONY: venv test test-all demo lint format types layers unsafe proto clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "hotswarm needs Python 3.11 or newer; set PYTHON=" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,demo]'
	@touch $(STAMP)

test: $(STAMP)
	$(BIN)/pytest -q -n 3 --dist loadfile -m 'not slow' $(ARGS)

test-all: $(STAMP)
	$(BIN)/pytest -q $(ARGS)

# ARGS=--fast for the short version
demo: $(STAMP)
	$(BIN)/swarm-node demo $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy

layers: $(STAMP)
	$(BIN)/lint-imports

# Peer bytes are data: nothing in the package may turn bytes into code. A grep, because `noqa` cannot silence it.
unsafe:
	@! grep -rnE '^\s*(import|from) +(pickle|cPickle|dill|marshal|shelve|joblib)\b|\bpickle\.[a-zA-Z]|(^|[^.[:alnum:]_])(eval|exec)\(|weights_only *= *False|yaml\.(unsafe_|full_)?load\(' src --include='*.py'
	@! grep -rnE 'torch\.load\(' src --include='*.py' | grep -v 'weights_only=True'

# Messages only: the service's stubs are written by hand around raw bytes.
proto: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -Iproto/hotswarm/v1 --python_out=src/hotswarm/_proto --pyi_out=src/hotswarm/_proto recovery.proto

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis demo-report
	find src tests -name __pycache__ -type d -exec rm -rf {} +
