//! Tokens that a change of users or roles ends, and where there was none before. Those that end with time, in a whole job,
//! are in `deploy::users`; those that etcd forgets, in `access`.

use std::path::PathBuf;
use std::time::Duration;

use elastic_coordinator::store::etcd::{EtcdConfig, EtcdStore, EtcdUser, Secret};
use elastic_coordinator::store::{LeaseId, Op, Revision, Scope, Store, Txn, WatchUpdate, Watcher};
use elastic_tests::etcd::{EtcdOptions, EtcdServer, etcd35, signed_tokens};
use elastic_tests::wait::within;

const LIMIT: Duration = Duration::from_secs(15);
const ROOT: &str = "root-secret";

/// Debian's etcd, and 3.5 where it is there: they tell of old tokens in different words.
fn binaries() -> Vec<Option<PathBuf>> {
    [None].into_iter().chain(etcd35().map(Some)).collect()
}

fn store_of_trainer(server: &EtcdServer) -> EtcdStore {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "secret").unwrap();
    let password = Secret::from_file(file.path()).unwrap();
    let user = Some(EtcdUser { name: "trainer".into(), password });
    EtcdStore::connect(EtcdConfig { user, ..server.config() }).unwrap()
}

fn own() -> Txn {
    Txn::of([Op::put("/elastic/a", "1")])
}

/// What an agent has of a store: a watch and a lease.
struct Held {
    store: EtcdStore,
    watcher: Watcher,
    lease: LeaseId,
}

impl Held {
    async fn by(store: EtcdStore) -> Held {
        let at = store.txn(own()).await.unwrap().revision;
        let watcher = store.watch(Scope::Prefix("/elastic/".into()), at.next()).await.unwrap();
        let lease = store.grant(Duration::from_secs(60)).await.unwrap();
        let mut held = Held { store, watcher, lease };
        held.is_well("at first").await;
        held
    }

    /// A write is carried out and known to be, the watch tells of it, a new one does too, and the lease is renewed.
    async fn is_well(&mut self, when: &str) {
        let mut new = self.store.watch(Scope::Prefix("/elastic/".into()), Revision(1)).await.unwrap();
        let update = within("a new watch's event", LIMIT, new.recv()).await;
        assert!(matches!(&update, Some(WatchUpdate::Events(_))), "{when}: {update:?}");
        let at = self.store.txn(own()).await.unwrap_or_else(|error| panic!("{when}: {error}")).revision;
        let update = within("an event", LIMIT, self.watcher.recv()).await;
        assert!(
            matches!(&update, Some(WatchUpdate::Events(events)) if events[0].revision() == at),
            "{when}: {update:?}, not {at}"
        );
        let renewed = self.store.keep_alive(self.lease).await;
        assert!(matches!(renewed, Ok(Some(_))), "{when}: {renewed:?}");
    }
}

#[tokio::test]
async fn a_change_of_users_or_roles_costs_nothing() {
    for binary in binaries() {
        // Given tokens that are out of date as soon as any role is changed
        let options = EtcdOptions { binary: binary.clone(), ..Default::default() };
        let (options, _key) = signed_tokens(options, "10m");
        let server = EtcdServer::start(options).await;
        server.enable_auth(ROOT, "secret").await;
        let mut held = Held::by(store_of_trainer(&server)).await;

        // when one is, between two calls, then nobody notices
        for role in ["one", "two"] {
            server.add_role(ROOT, role).await;
            held.is_well(&format!("{binary:?}, after role {role}")).await;
        }

        // and neither while an administrator makes some
        let making = async {
            for n in 0..5 {
                server.add_role(ROOT, &format!("role-{n}")).await;
            }
        };
        let working = async {
            for n in 0..6 {
                held.is_well(&format!("{binary:?}, while roles are made, {n}")).await;
            }
        };
        tokio::join!(making, working);
    }
}

#[tokio::test]
async fn users_who_come_to_be_later_are_taken_for_what_they_are() {
    for binary in binaries() {
        // Given a store with a user, on an etcd that asks for none
        let server = EtcdServer::start(EtcdOptions { binary: binary.clone(), ..Default::default() }).await;
        let mut held = Held::by(store_of_trainer(&server)).await;
        // when authentication is switched on, then it logs in
        server.enable_auth(ROOT, "secret").await;
        held.is_well(&format!("{binary:?}, with users")).await;
    }
}
