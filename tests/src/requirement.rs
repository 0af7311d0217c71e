//! What a test does where the machine lacks what it needs: it says so and ends, or fails if the machine is required to
//! have it.

use std::fmt::Display;

/// Says on standard error that a test is skipped, and why.
///
/// Panics instead if the environment variable `ELASTIC_REQUIRE_{what}` is set, and not to 0. So a machine that must run
/// all tests cannot pass by skipping some.
pub fn skip(what: &str, why: impl Display) {
    let name = format!("ELASTIC_REQUIRE_{what}");
    let required = std::env::var_os(&name).is_some_and(|value| !value.is_empty() && value != "0");
    assert!(!required, "{name} is set, and {why}");
    eprintln!("skipped: {why}");
}
