//! A warning is a failure of the test that causes it, and is printed: else a test would pass by a fall-back, without what
//! it is there to show.

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

/// From now on, in this process.
pub(crate) fn are_failures() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| tracing::subscriber::set_global_default(registry().with(Failing)).unwrap());
}

/// In this test there will be some.
pub(crate) fn are_expected() {
    EXPECTED.set(true);
}

#[test]
#[should_panic(expected = "products are computed by the trainer's own kernel, which is slower")]
fn products_without_the_library_are_one() {
    are_failures();
    // Something else under its name
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(crate::double::driver().join("libcuda.so.1"), folder.path().join("libcublasLt.so.13"))
        .unwrap();
    let mut surroundings = crate::double::on_the_double();
    surroundings.folders[1] = folder.path().to_owned();
    elastic_trainer::cuda::Gpu::open(&surroundings, 0).unwrap();
}
