# Two commands matter: `make demo` and `make test`.
SHELL := /bin/bash -o pipefail
export CGO_ENABLED := 0
GO ?= go
GOFLAGS_BUILD := -trimpath
BIN := $(CURDIR)/bin

# The sandbox is stamped like the Kubernetes release it is made of: client-go
# and Helm read the version from the API server.
KUBE_VERSION := 1.37.2
VERSION_PKG := k8s.io/component-base/version
KUBE_LDFLAGS := -s -w -X $(VERSION_PKG).gitVersion=v$(KUBE_VERSION) -X $(VERSION_PKG).gitMajor=1 \
	-X $(VERSION_PKG).gitMinor=37 -X $(VERSION_PKG).gitTreeState=clean \
	-X $(VERSION_PKG).buildDate=2026-01-01T00:00:00Z -X k8s.io/client-go/pkg/version.gitVersion=v$(KUBE_VERSION)

PRODUCT := $(BIN)/refit $(BIN)/refit-worker $(BIN)/refit-gpuagent
WORLD := $(BIN)/refit-kube $(BIN)/kwok $(BIN)/temporal $(BIN)/refit-sandbox

.PHONY: help build product world cassandra try-cassandra demo test test-unit test-e2e test-datastores test-long bench bench-datastores race vet workflowcheck test-gpu gpu-bundle generate coverage-check pictures record-histories clean FORCE

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

build: product world ## everything under bin/

product: $(PRODUCT)

world: $(WORLD)

$(BIN)/refit: FORCE
	@$(GO) build $(GOFLAGS_BUILD) -o $@ ./starter/cmd/refit

$(BIN)/refit-worker: FORCE
	@$(GO) build $(GOFLAGS_BUILD) -o $@ ./worker/cmd/refit-worker

# NVML's binding needs cgo. Never link it with -z now: its symbols are bound
# when the driver's library is there.
CGO := CGO_ENABLED=1 CGO_CFLAGS="-O1 -g -Wno-deprecated-declarations"
GPUAGENT := ./gpuagent/...

$(BIN)/refit-gpuagent: FORCE
	@$(CGO) $(GO) build $(GOFLAGS_BUILD) -ldflags "-s -w" -o $@ ./gpuagent/cmd/refit-gpuagent

$(BIN)/refit-sandbox: FORCE
	@cd sandbox && $(GO) build $(GOFLAGS_BUILD) -ldflags "$(KUBE_LDFLAGS)" -o $@ ./cmd/refit-sandbox

# The three below take minutes the first time; say so before it gets quiet.
$(BIN)/refit-kube: sandbox/go.mod sandbox/go.sum $(wildcard sandbox/cmd/refit-kube/*.go)
	@echo "building the Kubernetes control plane (etcd, API server, controllers, scheduler): 8-16 minutes the first time on 2 cores, seconds later"
	@cd sandbox && $(GO) build $(GOFLAGS_BUILD) -ldflags "$(KUBE_LDFLAGS)" -o $@ ./cmd/refit-kube

$(BIN)/kwok: sandbox/go.mod sandbox/go.sum | $(BIN)/refit-kube
	@echo "building kwok (the nodes): half a minute the first time"
	@cd sandbox && $(GO) build $(GOFLAGS_BUILD) -ldflags "$(KUBE_LDFLAGS)" -o $@ sigs.k8s.io/kwok/cmd/kwok

$(BIN)/temporal: tools/temporal/go.mod tools/temporal/go.sum
	@echo "building the Temporal CLI with its dev server: 3-5 minutes the first time on 2 cores"
	@cd tools/temporal && $(GO) build $(GOFLAGS_BUILD) -o $@ github.com/temporalio/cli/cmd/temporal

# Apache Cassandra, for the sandbox's datastores: some 70 MB of jars, which
# Maven fetches, and a Java runtime. Only what runs Cassandra needs it.
CASSANDRA := $(BIN)/cassandra/lib

$(CASSANDRA): sandbox/procnode/cassandrad/pom.xml tools/cassandra.sh
	@echo "fetching Apache Cassandra"
	@tools/cassandra.sh $(BIN)/cassandra

cassandra: $(CASSANDRA) ## Apache Cassandra for the sandbox (Java 17 and Maven)

# Where it can't be had, the tests that run it are skipped and listed; in CI that
# is a failure.
try-cassandra:
	@$(MAKE) --no-print-directory cassandra || { [ -z "$(CI)" ] && echo "going on without Cassandra: the tests that run it are skipped"; }

demo: ## the real thing on the embedded sandbox
	@tools/demo.sh

# Tests that need a program are told where it is. In CI -strict fails the run
# when one was skipped all the same, and -again runs what failed once more.
TEST_ENV := REFIT_BIN=$(BIN) REFIT_TEST_KUBE=$(BIN)/refit-kube REFIT_TEST_TEMPORAL=$(BIN)/temporal \
	REFIT_SANDBOX_KUBE=$(BIN)/refit-kube REFIT_SANDBOX_KWOK=$(BIN)/kwok REFIT_SANDBOX_TEMPORAL=$(BIN)/temporal \
	REFIT_SANDBOX_CASSANDRA=$(BIN)/cassandra REFIT_TEST_CASSANDRA=$(BIN)/cassandra/lib
REPORT := $(BIN)/testreport $(if $(CI),-strict -again)
UNIT := ./activities/... ./workflows/... ./starter/... ./worker/... ./deploy/... ./tools/... ./tests/replay
DATASTORES := $(foreach d,cassandra nats openbao,./activities/$d ./workflows/$d) ./workflows/datastore

$(BIN)/testreport: FORCE
	@$(GO) build $(GOFLAGS_BUILD) -o $@ ./tools/testreport

test: test-unit test-e2e test-datastores ## everything a change must pass

test-unit: world product try-cassandra $(BIN)/testreport ## packages of both modules
	$(TEST_ENV) $(REPORT) $(GO) test $(GOFLAGS_BUILD) -- $(UNIT)
	$(CGO) $(TEST_ENV) $(REPORT) $(GO) test $(GOFLAGS_BUILD) -- $(GPUAGENT)
	cd sandbox && $(TEST_ENV) $(REPORT) $(GO) test $(GOFLAGS_BUILD) -- ./...

test-e2e: world product $(BIN)/testreport ## through the binaries and the sandbox
	@$(TEST_ENV) $(REPORT) $(E2E) -timeout 30m -- ./tests/e2e

# After the packages' own tests, which in `make test` have been run and are cached.
test-datastores: world product try-cassandra $(BIN)/testreport ## the datastores' packages, and their runs on real servers
	$(TEST_ENV) $(REPORT) $(GO) test $(GOFLAGS_BUILD) -- $(DATASTORES)
	@$(TEST_ENV) $(REPORT) $(E2E) -timeout 60m -- ./tests/datastores

test-long: world product $(CASSANDRA) $(BIN)/testreport ## more kill points, seeds and the rarer hard cases
	@REFIT_TEST_LONG=1 $(TEST_ENV) $(REPORT) $(E2E) -timeout 120m -- ./tests/e2e ./activities/cassandra

# The tests mostly wait, so two of them share the cores. They run on real clocks
# (a heartbeat may be 5 s late), so not more. A real controller listens on one
# port whatever its sandbox: then one at a time.
E2E := $(GO) test $(GOFLAGS_BUILD) -count=1 -parallel $(if $(REFIT_TEST_TENSORFUSION),1,2)

race: $(BIN)/testreport ## the race detector on what is concurrent
	$(CGO) $(TEST_ENV) $(REPORT) $(GO) test -race -- $(RACE_PACKAGES)
	cd sandbox && $(CGO) $(TEST_ENV) $(REPORT) $(GO) test -race -skip 'NATS|Cassandra|OpenBao' -- $(RACE_SANDBOX)

RACE_PACKAGES := ./activities/artifact ./activities/mask ./activities/kube ./activities/lease ./activities/helm \
	./activities/tensorfusion ./starter/local \
	./gpuagent/child ./gpuagent/host

# The datastores' servers have tests of their own; here they would only be slow.
RACE_SANDBOX := ./tensorfusion/... ./agents ./control ./controller ./fault ./greptime ./kwok ./process ./procnode/... \
	./reaper ./registry

vet: ## go vet on both modules
	$(GO) vet $(GOFLAGS_BUILD) $$($(GO) list ./... | grep -v /gpuagent/)
	$(CGO) $(GO) vet $(GOFLAGS_BUILD) $(GPUAGENT)
	cd sandbox && $(GO) vet $(GOFLAGS_BUILD) ./...

workflowcheck: ## no clock, map range or goroutine in workflow code
	$(GO) tool workflowcheck -config workflows/workflowcheck.yaml ./workflows/...

bench: world product ## one line per figure
	$(GO) test $(GOFLAGS_BUILD) -count=1 -timeout 60m -run '^$$' -bench . ./tests/bench
	$(CGO) REFIT_BIN=$(BIN) $(GO) test $(GOFLAGS_BUILD) -count=1 -run '^$$' -bench . -benchtime 1x ./gpuagent/bench
	@$(MAKE) --no-print-directory bench-datastores

bench-datastores: world product $(CASSANDRA) ## Refit beside the guide's commands on real datastores
	$(TEST_ENV) $(GO) test $(GOFLAGS_BUILD) -count=1 -timeout 120m -run '^$$' -bench . ./tests/bench/datastores

test-gpu: ## on a real GPU, read-only; writes docs/gpu-h200.md
	REFIT_TEST_GPU=1 $(CGO) $(GO) test $(GOFLAGS_BUILD) -count=1 -v -timeout 45m -run '^TestTheGPUsAsFound$$' ./gpuagent/realgpu -args -page $(CURDIR)/docs/gpu-h200.md

gpu-bundle: ## the agent and its GPU tests in bin/gpu, for a host without network and Go
	@GO=$(GO) tools/gpu-bundle.sh

generate: ## schemas of the plan files and the coverage tables
	$(GO) test $(GOFLAGS_BUILD) -count=1 ./starter/planfile/schema -update
	$(GO) run $(GOFLAGS_BUILD) ./tools/coverage docs/tensorfusion-coverage.yaml
	$(GO) run $(GOFLAGS_BUILD) ./tools/coverage docs/nvcf-coverage.yaml

coverage-check: ## switch each check off and require that its test notices
	@tools/coverage-check.sh

pictures: world product ## the documentation's pictures, from a real run
	@tools/pictures.sh

record-histories: world product $(CASSANDRA) ## real runs for tests/replay, recorded anew
	@tools/record-histories.sh

clean: ## what was built; the Go caches stay
	rm -rf $(BIN)

FORCE:
