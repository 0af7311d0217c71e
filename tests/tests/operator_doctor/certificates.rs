//! Certificates of a real etcd that end soon, have ended, and are renewed.

use elastic_tests::prelude::*;

use super::Told;

const DAY: Duration = Duration::from_secs(86_400);

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

async fn server(certs: &Arc<Certs>) -> EtcdServer {
    let options = EtcdOptions { tls: Some(Arc::clone(certs)), client_certificates: true, ..Default::default() };
    EtcdServer::start(options).await
}

async fn told(etcd: &EtcdServer, certs: &Certs) -> Told {
    let (cert, key) = &certs.client;
    let files = ["--cacert", text(&certs.ca), "--cert", text(cert), "--key", text(key)];
    Told::by(&[&["--etcd", &etcd.address()][..], &files].concat()).await
}

#[tokio::test]
async fn what_ends_soon_is_a_warning_and_what_has_ended_fails_until_it_is_renewed() {
    let certs = Arc::new(Certs::new());
    let etcd = server(&certs).await;
    let at = etcd.address();
    let (ours, cas) = (text(&certs.client.0), text(&certs.ca));
    let (soon, past) = (SystemTime::now() + DAY * 10 + DAY / 2, SystemTime::now() - DAY);

    let first = told(&etcd, &certs).await;
    assert_eq!(first.code, Some(0), "{:#?}", first.findings);
    first.says("certificate", &at, "ok", "CN=server is good until");
    first.says("certificate", ours, "ok", "CN=client is good until");
    first.says("certificate", cas, "ok", "CN=CA of");
    first.says("clock", &at, "ok", "within");

    certs.renew_server(soon);
    let server_soon = told(&etcd, &certs).await;
    server_soon.says("certificate", &at, "warning", ", 10 days");
    let advice = server_soon.line("certificate", &at)["advice"].as_str().unwrap();
    assert!(advice.contains("certificates.sh renew DIRECTORY server,"), "{advice}");
    assert_eq!(server_soon.code, Some(0), "{:#?}", server_soon.findings);

    // It is shown to us though we do not trust it.
    certs.renew_server(past);
    let server_past = told(&etcd, &certs).await;
    server_past.says("certificate", &at, "failed", "CN=server has ended");
    server_past.says("certificate", ours, "ok", "");
    server_past.says("answer", &at, "failed", "expired");

    certs.renew_server(soon + DAY * 99);
    certs.renew_client(soon);
    let client_soon = told(&etcd, &certs).await;
    client_soon.says("certificate", &at, "ok", "");
    client_soon.says("certificate", ours, "warning", ", 10 days");
    assert_eq!(client_soon.code, Some(0), "{:#?}", client_soon.findings);

    certs.renew_client(past);
    let client_past = told(&etcd, &certs).await;
    client_past.says("certificate", ours, "failed", "CN=client has ended");
    client_past.says("certificate", &at, "ok", "");
    client_past.says("answer", &at, "failed", "");

    certs.renew_client(soon + DAY * 99);
    assert_eq!(told(&etcd, &certs).await.code, Some(0));
}

#[tokio::test]
async fn a_ca_that_ends_soon_is_a_warning() {
    let certs = Arc::new(Certs::of_a_ca_until(SystemTime::now() + DAY * 20 + DAY / 2));
    let etcd = server(&certs).await;
    let told = told(&etcd, &certs).await;
    told.says("certificate", text(&certs.ca), "warning", ", 20 days");
    let advice = told.line("certificate", text(&certs.ca))["advice"].as_str().unwrap();
    assert!(advice.contains("certificates.sh new DIRECTORY"), "{advice}");
    assert_eq!(told.code, Some(0), "{:#?}", told.findings);
}
