//! `elastic-agent`: torchrun's place on each node, for jobs that grow, shrink and survive.

fn main() -> std::process::ExitCode {
    elastic_agent::main()
}
