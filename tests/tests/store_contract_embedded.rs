//! The store contract on the embedded store: in the process, and over the network through the etcd client. What only
//! etcd's API shows is in the coordinator's own tests.

// Tests report by panicking, their helpers too.

use elastic_tests::prelude::*;

use elastic_store::embedded::MemoryStore;
use elastic_store::embedded::mvcc::Limits;
use elastic_store::embedded::{EmbeddedServer, Hub};
use elastic_tests::contract::{Compact, Subject};

fn compact(hub: Arc<Hub>) -> Compact {
    Arc::new(move |revision| {
        let hub = hub.clone();
        Box::pin(async move { hub.with(|mvcc, _| mvcc.compact(revision)).expect("compaction") })
    })
}

fn subject(store: impl Store + 'static, memory: &MemoryStore) -> Subject {
    Subject::new(Arc::new(store), compact(memory.hub().clone()))
}

async fn in_process() -> Subject {
    let store = MemoryStore::start(Limits::default());
    subject(store.clone(), &store)
}

async fn over_the_network() -> Subject {
    let server = EmbeddedServer::bind(([127, 0, 0, 1], 0).into(), false).await.expect("a free port");
    let (address, memory) = (server.address(), server.store());
    // Ends with the runtime of the group.
    tokio::spawn(server.serve(std::future::pending()));
    subject(EtcdStore::connect(EtcdConfig::new([address.to_string()])).expect("a good address"), &memory)
}

async fn on_three() -> Subject {
    let store = Replicated::start().await;
    let client = store.client().await;
    let compact: Compact = Arc::new(move |revision: Revision| {
        let mut client = client.clone();
        Box::pin(async move {
            client.compact(revision.0, None).await.expect("compaction");
        })
    });
    Subject::new(Arc::new(EtcdStore::connect(store.config()).expect("a good address")), compact).keeping(store)
}

elastic_tests::contract_suite!(memory, in_process);
elastic_tests::contract_suite!(server, over_the_network);
elastic_tests::contract_suite!(replicated, on_three);
