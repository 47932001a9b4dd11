# What a contributor does; `.ci/run` does setup, test, lint and docs in a fresh environment.
.PHONY: setup test suite mutations lint docs bench

setup:  ## everything a contributor needs, into the active environment
	pip install -e '.[dev,docs]'
	pre-commit install

test:  ## minutes; slow ones: pytest -m slow, on a GPU: pytest -m gpu
	pytest

suite:  ## the tests, with a record of their minutes
	python benchmarks/suite.py --output benchmarks/results/$(shell date +%F)-suite.json

mutations:  ## whether the tests notice small faults
	python benchmarks/mutations.py

lint:
	ruff check .
	ruff format --check .
	typos
	mypy
	mypy serve

docs:  ## the site, into ./site
	python docs/plots/architecture.py --check
	mkdocs build --strict

bench:  ## the two figures that every change to rollout or update is held against
	python benchmarks/rollout.py
	python benchmarks/step.py
