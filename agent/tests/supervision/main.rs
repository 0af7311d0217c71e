//! Worker supervision with real processes: whatever was started ends, in every way that an agent can end. There are no
//! rounds here, and no other nodes.
//!
//! Each test runs this binary again as a small agent that plays one scene; see [`scene`].
#![allow(missing_docs, clippy::print_stdout, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod deaths;
mod deny;
mod nursery;
mod output;
mod scene;
mod starts;
mod stops;

use libtest_mimic::{Arguments, Trial};

fn main() -> std::process::ExitCode {
    if let Some(code) = elastic_agent::for_tests::serve_as_guard() {
        return code;
    }
    if let Some(name) = std::env::var_os(scene::NAME) {
        return scene::play(&name.to_string_lossy());
    }
    let arguments = Arguments::from_args();
    let mut trials: Vec<Trial> =
        scene::all().into_iter().filter(|scene| scene.alone).map(scene::Scene::trial).collect();
    trials.extend(deaths::trials());
    trials.extend(deny::trials());
    trials.push(nursery::trial());
    libtest_mimic::run(&arguments, trials).exit_code()
}
