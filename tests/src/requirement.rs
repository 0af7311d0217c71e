//! What a test needs and the machine lacks: the test says so and ends, unless the machine is required to have it.

use std::fmt::Display;

/// Says on standard error that a test is skipped, and why.
///
/// Panics instead if the environment variable `ELASTIC_REQUIRE_{what}` is set, and not to 0: so a machine that must run
/// everything cannot pass by skipping tests.
pub fn skip(what: &str, why: impl Display) {
    let name = format!("ELASTIC_REQUIRE_{what}");
    let required = std::env::var_os(&name).is_some_and(|value| !value.is_empty() && value != "0");
    assert!(!required, "{name} is set, and {why}");
    eprintln!("skipped: {why}");
}
