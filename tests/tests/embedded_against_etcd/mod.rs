//! Random histories run on a real etcd and on the embedded server: every answer and every event must be the same.
//! They may differ in times, ids, and the headers inside a transaction's answer, so these are not compared.

// Tests report by panicking, their helpers too.

mod answer;
mod plan;

use std::cell::Cell;

use elastic_store::embedded::EmbeddedServer;
use elastic_tests::prelude::*;
use etcd_client::{Client, WatchOptions};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{TestCaseError, TestRunner};

use answer::Answer;
use plan::Step;

/// The number of cases. `PROPTEST_CASES` sets another.
const CASES: u32 = 40;

/// No answer takes longer.
const PATIENCE: Duration = Duration::from_secs(5);

/// A server under test, and where its history stood when the case began.
struct Side {
    client: Client,
    base: i64,
}

impl Side {
    async fn begin(client: &Client) -> Side {
        let mut client = client.clone();
        let base = client.get("nothing", None).await.expect("a read").header().expect("a header").revision();
        Side { client, base }
    }

    /// All events of the case from a revision on, to the one that ends it.
    async fn events(&mut self, prefix: &str, from: i64) -> Vec<Answer> {
        let options = WatchOptions::new().with_prefix().with_prev_key().with_start_revision(self.base + from);
        let mut stream = self.client.watch(prefix, Some(options)).await.expect("a watch");
        let mut seen = Vec::new();
        loop {
            let message = within("an event", PATIENCE, stream.message()).await;
            let mut response = message.expect("an open stream").expect("a message").0;
            if response.created {
                continue;
            }
            for event in &mut response.events {
                answer::localize_event(event, self.base);
            }
            let over = response.canceled || response.events.iter().any(|event| is_end(event, prefix));
            if response.canceled {
                seen.push(Answer::Canceled(response.compact_revision - self.base));
            }
            seen.extend(response.events.into_iter().map(Answer::Event));
            if over {
                return seen;
            }
        }
    }
}

fn is_end(event: &etcd_client::proto::PbEvent, prefix: &str) -> bool {
    event.kv.as_ref().is_some_and(|kv| kv.key == format!("{prefix}end").as_bytes())
}

async fn play(etcd: &Client, embedded: &Client, number: u32, steps: &[Step]) -> Result<(), TestCaseError> {
    let prefix = format!("case{number:05}/");
    let (mut etcd, mut embedded) = (Side::begin(etcd).await, Side::begin(embedded).await);
    let mut compacted = 0;
    for (at, step) in steps.iter().enumerate() {
        let wanted = within("etcd's answer", PATIENCE, step.play(&mut etcd.client, etcd.base, &prefix, number)).await;
        let got = step.play(&mut embedded.client, embedded.base, &prefix, number);
        let got = within("the embedded server's answer", PATIENCE, got).await;
        prop_assert_eq!(&got, &wanted, "step {}: {:?}", at, step);
        if let (Step::Compact(revision), Answer::Done(_)) = (step, &wanted) {
            compacted = *revision;
        }
    }
    for side in [&mut etcd, &mut embedded] {
        side.client.put(format!("{prefix}end"), "", None).await.expect("a write");
    }
    // From the compacted revision itself etcd before 3.5.18 can leave a deletion out.
    for from in [1, compacted - 1, compacted + 1] {
        if from > 0 && from != compacted {
            prop_assert_eq!(embedded.events(&prefix, from).await, etcd.events(&prefix, from).await, "from {}", from);
        }
    }
    Ok(())
}

/// As the newest: releases differ in which of two faults of a request they name.
#[test]
fn the_embedded_server_answers_as_etcd_does() {
    let Some(newest) = etcd_of("3.7") else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let (_real, etcd, embedded) = runtime.block_on(async {
        let real = EtcdServer::start(EtcdOptions { binary: Some(newest), ..EtcdOptions::default() }).await;
        let etcd = real.client().await;
        let server = EmbeddedServer::bind(([127, 0, 0, 1], 0).into(), false).await.expect("a free port");
        let address = server.address().to_string();
        tokio::spawn(server.serve(std::future::pending()));
        (real, etcd, Client::connect([address], None).await.expect("a connection"))
    });
    let number = Cell::new(0);
    let cases =
        std::env::var("PROPTEST_CASES").map_or(CASES, |number| number.parse().expect("PROPTEST_CASES is a number"));
    let config = ProptestConfig { cases, max_shrink_iters: 60, failure_persistence: None, ..Default::default() };
    let told = TestRunner::new(config).run(&vec(plan::step(), 1..30), |steps| {
        number.set(number.get() + 1);
        runtime.block_on(play(&etcd, &embedded, number.get(), &steps))
    });
    told.unwrap_or_else(|failure| panic!("{failure}"));
}
