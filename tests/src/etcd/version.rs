//! A server that only tells its version over HTTP, as an etcd without the v2 API does. It represents versions that are
//! not installed.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

/// Serves `version` at `/version`, whatever it is, and nothing else; its address. Must be called within a tokio
/// runtime, with which it ends.
pub async fn version_server(version: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("its address").to_string();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = [0; 1024];
            let length = stream.read(&mut request).await.unwrap_or(0);
            let known = String::from_utf8_lossy(&request[..length]).starts_with("GET /version");
            let (status, body) = if known { ("200 OK", version) } else { ("404 Not Found", "404 page not found") };
            let answer =
                format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len());
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    address
}
