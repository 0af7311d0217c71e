//! Generates the gRPC types when the `grpc` feature asks for them.

fn main() -> std::io::Result<()> {
    println!("cargo:rerun-if-changed=proto");
    if std::env::var_os("CARGO_FEATURE_GRPC").is_some() {
        tonic_prost_build::configure().compile_protos(&["proto/logs.proto", "proto/pulse.proto"], &["proto"])?;
    }
    Ok(())
}
