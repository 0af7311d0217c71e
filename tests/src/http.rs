//! A plain HTTP client, for what a server says of itself.

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// The whole answer to a GET of `path` at `address`, whatever its status.
///
/// Panics if there is none.
pub async fn answer(address: &str, path: &str) -> String {
    answer_to(address, address, path).await
}

/// The same, to a client that calls the server `host`.
pub async fn answer_to(host: &str, address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).await.expect("a server");
    let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("ask a server");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("an answer");
    answer
}

/// The body of the answer to a GET of `path` at `address`.
///
/// # Errors
/// There is no answer, or not with 200.
pub async fn get(address: &str, path: &str) -> Result<Vec<u8>> {
    let mut stream = TcpStream::connect(address).await.with_context(|| format!("connect to {address}"))?;
    let request = format!("GET {path} HTTP/1.0\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    let status = answer.split(|byte| *byte == b'\r').next().unwrap_or_default();
    ensure!(status.ends_with(b" 200 OK"), "{address}{path}: {}", String::from_utf8_lossy(&answer));
    let body = answer.windows(4).position(|window| window == b"\r\n\r\n").context("a body")?;
    Ok(answer.split_off(body + 4))
}
