# `make help` prints the ## comments. The stack itself is scripts/stack; these targets only put the steps in order.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
# The release that is known to build with the Go of go.mod. Built from source into the cache, since it must be built with the Go that it checks.
GOLANGCI_VERSION := v2.15.0
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/lapse
# The fuzzer of the API, in a Python environment of its own.
SCHEMATHESIS_VERSION := 4.32.5
SCHEMATHESIS := $(CACHE)/schemathesis-$(SCHEMATHESIS_VERSION)/bin/schemathesis
FUZZ_SECONDS ?= 60
GOLANGCI := $(CACHE)/golangci-lint-$(GOLANGCI_VERSION)/golangci-lint
SHELL_SCRIPTS := scripts/stack scripts/compose-test .ci/run $(wildcard scripts/*.sh deploy/compose/*.sh)

# Flags for a part of the tests: make test GO_TEST_ARGS='-run Cancel ./orders'
GO_TEST_ARGS ?= ./...
GO_TEST_TIMEOUT ?= 15m
DEMO_ARGS ?=
BENCH_ARGS ?=

.PHONY: help
help: ## Print this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: stack-up
stack-up: ## Start MySQL with a read replica, and RocketMQ; what is missing is fetched
	@scripts/stack up --with replica

.PHONY: stack-down
stack-down: ## Stop them; the data stays
	@scripts/stack down

.PHONY: build
build: ## Build bin/lapse
	@mkdir -p bin
	go build -ldflags '-X main.version=$(VERSION)' -o bin/lapse ./cmd/lapse

.PHONY: demo
demo: build ## The whole path on real servers; make demo DEMO_ARGS='--lose 5' or '--timeout 30m'
	@scripts/stack up --with replica
	@eval "$$(scripts/stack env)"; bin/lapse migrate up
	@eval "$$(scripts/stack env)"; exec bin/lapse demo $(DEMO_ARGS)

.PHONY: test
test: ## All tests, on the real servers, with the race detector; never from the cache, which knows nothing of servers
	@scripts/stack up --with replica
	@eval "$$(scripts/stack env)"; export LAPSE_TEST_REQUIRE_STACK=1; \
	  go test -race -count=1 -timeout $(GO_TEST_TIMEOUT) $(GO_TEST_ARGS) || { rc=$$?; echo "The servers are still up; scripts/stack down stops them."; exit $$rc; }
	@echo "The servers are still up; scripts/stack down stops them."

.PHONY: test-full
test-full: export LAPSE_TEST_FULL := 1
test-full: GO_TEST_TIMEOUT := 120m
test-full: test ## The same with the cases' times taken literally; more than an hour

.PHONY: bench
bench: build ## Every benchmark once, and a small burst: that they work. Figures: 'lapse bench', README
	@scripts/stack up
	@eval "$$(scripts/stack env)"; export LAPSE_TEST_REQUIRE_STACK=1; \
	  go test -run '^$$' -bench . -benchtime 1x -timeout $(GO_TEST_TIMEOUT) ./...
	@eval "$$(scripts/stack env)"; exec bin/lapse bench burst --orders 2000 --repeat 1 --one-by-one-workers 16 --limit-workers 2 $(BENCH_ARGS)

.PHONY: compose-test
compose-test: ## docker-compose.yml tried for real: built, used, killed, restarted, removed; needs Docker
	@scripts/compose-test

.PHONY: api-fuzz
api-fuzz: $(SCHEMATHESIS) ## Let a fuzzer that knows openapi.yaml look for a 5xx; make api-fuzz FUZZ_SECONDS=600
	@scripts/stack up
	@eval "$$(scripts/stack env)"; export LAPSE_TEST_REQUIRE_STACK=1 LAPSE_TEST_SCHEMATHESIS=$(SCHEMATHESIS) LAPSE_TEST_FUZZ_SECONDS=$(FUZZ_SECONDS); \
	  go test -count=1 -timeout 2h -v -run TestTheFuzzerFindsNoFault ./internal/api

$(SCHEMATHESIS):
	@command -v python3 >/dev/null || { echo "api-fuzz: python3 is missing; install the packages python3 and python3-venv" >&2; exit 3; }
	@echo "installing schemathesis $(SCHEMATHESIS_VERSION) into $(patsubst %/bin/,%,$(dir $@)) (once)"
	@rm -rf "$(patsubst %/bin/,%,$(dir $@))" && python3 -m venv "$(patsubst %/bin/,%,$(dir $@))"
	@"$(@D)/pip" install --quiet --disable-pip-version-check schemathesis==$(SCHEMATHESIS_VERSION) || { rm -rf "$(patsubst %/bin/,%,$(dir $@))"; exit 1; }

.PHONY: lint
lint: $(GOLANGCI) ## go vet, golangci-lint, shellcheck
	@command -v shellcheck >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  { apt-get install -y -qq shellcheck >/dev/null 2>&1 || { apt-get update -qq && apt-get install -y -qq shellcheck >/dev/null; }; }; } || \
	  { echo "lint: shellcheck is missing; install the package shellcheck" >&2; exit 3; }
	shellcheck -x $(SHELL_SCRIPTS)
	go vet ./...
	@# What compiles for vet compiles: a complaint of "typecheck" after it is golangci-lint losing a package on a busy machine. Once more, then.
	@out=$$(mktemp); trap 'rm -f "$$out"' EXIT; echo "golangci-lint run ./..."; \
	  $(GOLANGCI) run ./... | tee "$$out" || { grep -q '(typecheck)$$' "$$out" && $(GOLANGCI) run ./...; }

$(GOLANGCI):
	@echo "building golangci-lint $(GOLANGCI_VERSION) into $(@D) (some minutes, once)"
	@mkdir -p "$(CACHE)"
	@GOBIN="$(@D).part" GOFLAGS= go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_VERSION)
	@mkdir -p "$(@D)" && mv "$(@D).part/golangci-lint" "$@" && rmdir "$(@D).part"

.PHONY: fmt
fmt: ## gofmt everything
	gofmt -l -w $$(git ls-files '*.go')
