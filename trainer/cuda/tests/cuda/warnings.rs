//! Makes a warning fail the test that causes it, and prints the warning. Else a test could pass by a fall-back, without
//! testing what it should.

use std::cell::Cell;
use std::sync::Once;

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry;

thread_local! {
    static EXPECTED: Cell<bool> = const { Cell::new(false) };
}

struct Failing;

impl<S: Subscriber> Layer<S> for Failing {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let warns = *event.metadata().level() <= Level::WARN;
        assert!(!warns || EXPECTED.get(), "a warning: {event:?}");
        if warns {
            eprintln!("as expected: {event:?}");
        }
    }
}

/// From now on warnings fail the test of this process.
pub(crate) fn are_failures() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| tracing::subscriber::set_global_default(registry().with(Failing)).unwrap());
}

/// This test causes warnings on purpose.
#[allow(dead_code)] // Only tests of the trainer expect any.
pub(crate) fn are_expected() {
    EXPECTED.set(true);
}
