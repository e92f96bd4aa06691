//! The cluster's certificate authority, a certificate for each of its parts, and a kubeconfig with each.

use std::fs;
use std::io::Write;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::Context;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose, SanType,
};
use serde_json::json;

use super::layout::{API_SERVER, Machine, Prefix};

/// The first address of the services' range: the API server's own service.
const KUBERNETES_SERVICE: &str = "10.96.0.1";

/// Who gets a certificate: a file name, and the user that it stands for to the API server.
struct Subject {
    file: String,
    name: String,
    group: Option<&'static str>,
    addresses: Vec<IpAddr>,
    names: Vec<String>,
}

impl Subject {
    fn user(file: &str, name: &str, group: Option<&'static str>) -> Self {
        Self {
            file: file.to_owned(),
            name: name.to_owned(),
            group,
            addresses: Vec::new(),
            names: Vec::new(),
        }
    }
}

fn subjects() -> anyhow::Result<Vec<Subject>> {
    let mut server = Subject::user("apiserver", "kube-apiserver", None);
    server.addresses = vec![API_SERVER.into(), [127, 0, 0, 1].into(), KUBERNETES_SERVICE.parse()?];
    server.names = ["", ".default", ".default.svc", ".default.svc.cluster.local"]
        .map(|rest| format!("kubernetes{rest}"))
        .to_vec();
    let mut all = vec![
        server,
        Subject::user("admin", "admin", Some("system:masters")),
        Subject::user(
            "apiserver-kubelet",
            "kube-apiserver-kubelet-client",
            Some("system:masters"),
        ),
        Subject::user("controller-manager", "system:kube-controller-manager", None),
        Subject::user("scheduler", "system:kube-scheduler", None),
        Subject::user("kube-proxy", "system:kube-proxy", None),
    ];
    for node in Machine::nodes() {
        let name = format!("system:node:{node}");
        let mut subject = Subject::user(&node.to_string(), &name, Some("system:nodes"));
        subject.addresses = vec![node.v4().into(), node.v6().into()];
        subject.names = vec![node.to_string()];
        all.push(subject);
    }
    Ok(all)
}

/// Makes all of it.
pub(super) fn make(prefix: &Prefix) -> anyhow::Result<()> {
    let folder = prefix.pki("");
    fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    let mut params = CertificateParams::default();
    params.distinguished_name = name("adit-cluster", None);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![
        KeyUsagePurpose::KeyCertSign,
        KeyUsagePurpose::CrlSign,
        KeyUsagePurpose::DigitalSignature,
    ];
    let ca = CertifiedIssuer::self_signed(params, KeyPair::generate()?).context("make the cluster's root")?;
    write(&prefix.pki("ca.crt"), &ca.pem())?;
    for subject in subjects()? {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(subject.names.clone())?;
        params.distinguished_name = name(&subject.name, subject.group);
        params
            .subject_alt_names
            .extend(subject.addresses.iter().copied().map(SanType::IpAddress));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        let certificate = params
            .signed_by(&key, &ca)
            .with_context(|| format!("sign the certificate of {}", subject.name))?;
        let (crt, pem) = (format!("{}.crt", subject.file), format!("{}.key", subject.file));
        write(&prefix.pki(&crt), &certificate.pem())?;
        write(&prefix.pki(&pem), &key.serialize_pem())?;
        let config = kubeconfig(prefix, &prefix.pki(&crt), &prefix.pki(&pem));
        write(&prefix.pki(&format!("{}.kubeconfig", subject.file)), &config)?;
    }
    // Tokens of service accounts are signed with a key that has no certificate.
    let key = KeyPair::generate()?;
    write(&prefix.pki("service-accounts.key"), &key.serialize_pem())?;
    write(&prefix.pki("service-accounts.pub"), &key.public_key_pem())
}

fn name(common: &str, group: Option<&str>) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    if let Some(group) = group {
        name.push(DnType::OrganizationName, group);
    }
    name.push(DnType::CommonName, common);
    name
}

/// JSON is YAML.
fn kubeconfig(prefix: &Prefix, certificate: &Path, key: &Path) -> String {
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "adit",
        "contexts": [{"name": "adit", "context": {"cluster": "adit", "user": "user"}}],
        "clusters": [{"name": "adit", "cluster": {
            "server": format!("https://{API_SERVER}:6443"),
            "certificate-authority": prefix.pki("ca.crt"),
        }}],
        "users": [{"name": "user", "user": {"client-certificate": certificate, "client-key": key}}],
    })
    .to_string()
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let written = options.open(path).and_then(|mut file| file.write_all(text.as_bytes()));
    written.with_context(|| format!("write {}", path.display()))
}
