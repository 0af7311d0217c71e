//! Generates the gRPC types when the `grpc` feature asks for them.

use std::path::PathBuf;

/// The enums of `jobs.proto`, and the fields that hold them.
const ENUMS: &[(&str, &[&str])] = &[
    ("JobState", &["JobSummary.state", "Job.state"]),
    ("RoundState", &["Round.state", "Event.state"]),
    ("Phase", &["NodeRecord.phase"]),
    ("FailureClass", &["Failure.class"]),
    ("Killer", &["Killing.by"]),
    ("RestartPolicy", &["Spec.restart_policy"]),
    ("OnStoreLoss", &["Spec.on_store_loss"]),
    ("Via", &["Requester.via"]),
    ("Fate", &["Tombstone.fate"]),
    ("Role", &["MeReply.role"]),
];

fn main() -> std::io::Result<()> {
    println!("cargo:rerun-if-changed=proto");
    if std::env::var_os("CARGO_FEATURE_GRPC").is_some() {
        tonic_prost_build::configure()
            .compile_protos(&["proto/bandwidth.proto", "proto/logs.proto", "proto/pulse.proto"], &["proto"])?;
        tonic_prost_build::configure().compile_protos(&["proto/replication.proto"], &["proto"])?;
        jobs().compile_protos(&["proto/jobs.proto"], &["proto"])?;
    }
    Ok(())
}

/// Messages about jobs are JSON's records under other names for the same: serde reads the one from the other.
fn jobs() -> tonic_prost_build::Builder {
    const SERDE: &str = "#[derive(serde::Serialize, serde::Deserialize)]";
    let package = ".elastic.jobs.v1";
    let descriptors = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default()).join("jobs.bin");
    let mut jobs = tonic_prost_build::configure()
        .file_descriptor_set_path(descriptors)
        .message_attribute(package, SERDE)
        .message_attribute(package, "#[serde(default)]")
        .enum_attribute(package, SERDE)
        .enum_attribute(format!("{package}.AskRequest.wish"), "#[serde(rename_all = \"kebab-case\")]");
    for (name, fields) in ENUMS {
        jobs = jobs.enum_attribute(format!("{package}.{name}"), "#[serde(rename_all = \"snake_case\")]");
        for field in *fields {
            let by_name = format!(
                "#[serde(serialize_with = \"name_of::<{name}, _>\", deserialize_with = \"named::<{name}, _>\")]"
            );
            jobs = jobs.field_attribute(format!("{package}.{field}"), by_name);
        }
    }
    jobs
}
