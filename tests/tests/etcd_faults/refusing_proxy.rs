//! A gRPC proxy in front of an etcd server. When told to, it answers calls itself, as a healthy server does that cannot
//! carry them out now. Broken connections are in [`elastic_tests::proxy`].

use elastic_tests::prelude::*;
use std::sync::atomic::{AtomicU32, Ordering};

use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tonic::body::Body;
use tonic::client::GrpcService;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Code, Status};

/// A proxy that runs on the test's runtime and ends when dropped.
pub(super) struct RefusingProxy {
    address: String,
    state: Arc<State>,
    serving: JoinHandle<()>,
}

struct State {
    etcd: Channel,
    /// Transactions that are still to be refused, and those that were.
    left: AtomicU32,
    refused: AtomicU32,
    watches: AtomicU32,
    answer: Status,
}

impl RefusingProxy {
    /// Listens on a port that the kernel picks, and passes everything on to the server at `upstream`. It refuses
    /// transactions with this message.
    pub(super) async fn start(upstream: String, code: Code, words: &str) -> RefusingProxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address").to_string();
        let etcd = Endpoint::from_shared(format!("http://{upstream}")).expect("an address").connect_lazy();
        let (left, refused, watches) = Default::default();
        let state = Arc::new(State { etcd, left, refused, watches, answer: Status::new(code, words) });
        let answering = Arc::clone(&state);
        let answer = axum::Router::new().fallback(move |request| answer(Arc::clone(&answering), request));
        let serving = tokio::spawn(async move {
            let server = Server::builder().add_routes(answer.into());
            let _ = server.serve_with_incoming(TcpIncoming::from(listener)).await;
        });
        RefusingProxy { address, state, serving }
    }

    /// `host:port` to connect to.
    pub(super) fn address(&self) -> String {
        self.address.clone()
    }

    pub(super) fn refuse(&self, count: u32) {
        self.state.left.store(count, Ordering::SeqCst);
    }

    pub(super) fn refused(&self) -> u32 {
        self.state.refused.load(Ordering::SeqCst)
    }

    pub(super) fn watches(&self) -> u32 {
        self.state.watches.load(Ordering::SeqCst)
    }
}

impl Drop for RefusingProxy {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn answer(state: Arc<State>, request: axum::extract::Request) -> axum::response::Response {
    if request.uri().path() == "/etcdserverpb.Watch/Watch" {
        state.watches.fetch_add(1, Ordering::SeqCst);
    }
    let refuses = request.uri().path() == "/etcdserverpb.KV/Txn"
        && state.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok();
    if refuses {
        state.refused.fetch_add(1, Ordering::SeqCst);
        return state.answer.clone().into_http::<Body>().map(axum::body::Body::new);
    }
    let mut etcd = state.etcd.clone();
    let passed = async {
        std::future::poll_fn(|context| GrpcService::poll_ready(&mut etcd, context)).await?;
        GrpcService::call(&mut etcd, request.map(Body::new)).await
    };
    match tokio::time::timeout(Duration::from_secs(600), passed).await {
        Ok(Ok(response)) => response.map(axum::body::Body::new),
        _ => Status::unavailable("the proxy cannot pass it on").into_http::<Body>().map(axum::body::Body::new),
    }
}
