//! Certificates by an authority of the test's own, from files: revoked ones, and such of other trust domains.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use adit_tests::bed::{AccessLine, Bed, Node, wait_for};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DnType,
    ExtendedKeyUsagePurpose, IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SanType, SerialNumber,
};

use crate::world::{LONG, PORT, SOON, echo, is_answered, source_line, talks, world};

const DAY: Duration = Duration::from_secs(24 * 3600);

/// An authority that signs below its root, and numbers what it signs.
struct Authority {
    root: CertifiedIssuer<'static, KeyPair>,
    domain: &'static str,
}

impl Authority {
    fn new(domain: &'static str) -> Self {
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, format!("root of {domain}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let root = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        Self { root, domain }
    }

    /// Puts a certificate with this number where a proxy looks for that of the account of namespace `shop`.
    fn issue(&self, folder: &Path, account: &str, serial: u64) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        let id = format!("spiffe://{}/ns/shop/sa/{account}", self.domain);
        params.subject_alt_names = vec![SanType::URI(id.try_into().unwrap())];
        params.serial_number = Some(SerialNumber::from(serial));
        let now = SystemTime::now();
        (params.not_before, params.not_after) = ((now - DAY).into(), (now + DAY).into());
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        let leaf = params.signed_by(&key, &self.root).unwrap();
        let folder = folder.join("shop").join(account);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("ca.crt"), self.root.pem()).unwrap();
        fs::write(folder.join("tls.key"), key.serialize_pem()).unwrap();
        fs::write(folder.join("tls.crt"), leaf.pem()).unwrap();
    }

    /// A list of the certificates with these numbers that holds until `until`.
    fn revoke(&self, list: &Path, serials: &[u64], until: SystemTime) {
        let now = SystemTime::now();
        let revoked = serials.iter().map(|serial| RevokedCertParams {
            serial_number: SerialNumber::from(*serial),
            revocation_time: now.into(),
            reason_code: None,
            invalidity_date: None,
        });
        let params = CertificateRevocationListParams {
            this_update: (now - 2 * DAY).into(),
            next_update: until.into(),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let new = list.with_extension("new");
        fs::write(&new, params.signed_by(&self.root).unwrap().pem().unwrap()).unwrap();
        fs::rename(new, list).unwrap();
    }
}

fn option(flag: &str, path: &Path) -> String {
    format!("{flag}={}", path.display())
}

fn launch(node: &Node, more: &[&str]) {
    node.launch_with(more).unwrap();
    node.wait_ready(LONG).unwrap();
}

fn wait_answered(bed: &Bed, from: &str, to: &str) {
    let what = format!("an answer to {from} by {to}");
    wait_for(&what, LONG, || Ok(is_answered(bed.pod(from), bed.pod(to).at(PORT)))).unwrap();
}

/// Waits until new connections are refused, and gives the line in which the proxy that refuses says why.
fn wait_refused(bed: &Bed, by: &str, why: &str) -> AccessLine {
    wait_for("connections to be refused", LONG, || {
        Ok(!is_answered(bed.pod("client"), bed.pod("server").at(PORT)))
    })
    .unwrap();
    let told = |line: &AccessLine| line.get("how") == "identity" && line.get("detail").contains(why);
    bed.node(by).wait_for_access(why, SOON, told).unwrap()
}

/// The world with an authority that has signed certificates 1, 2 and 3 for its accounts in turn, and a list that names 77 and
/// holds until `until`. Every certificate has to be spoken of by a list.
fn with_list(name: &str, folder: &Path, until: SystemTime) -> (Bed, Authority, PathBuf, PathBuf) {
    let (certificates, list) = (folder.join("certificates"), folder.join("list.pem"));
    let authority = Authority::new("cluster.local");
    for (serial, account) in (1..).zip(["client", "neighbour", "server"]) {
        authority.issue(&certificates, account, serial);
    }
    authority.revoke(&list, &[77], until);
    let bed = world(name)
        .node_argument(&option("--certificate-folder", &certificates))
        .node_argument(&option("--crl", &list))
        .node_argument("--crl-policy=strict")
        .build()
        .unwrap();
    bed.nodes().iter().for_each(|node| launch(node, &[]));
    (bed, authority, certificates, list)
}

#[test]
fn a_revoked_certificate_makes_no_connections_and_those_that_rest_on_it_end() {
    let folder = tempfile::tempdir().unwrap();
    let tomorrow = SystemTime::now() + DAY;
    let (bed, authority, certificates, list) = with_list("revocation", folder.path(), tomorrow);
    let (client, neighbour, server) = (bed.pod("client"), bed.pod("neighbour"), bed.pod("server"));
    let _server = echo(server, PORT);
    let (revoked, mut other) = (talks(client, server.at(PORT), 2), talks(neighbour, server.at(PORT), 2));

    authority.revoke(&list, &[77, 1], tomorrow);
    let cut = |line: &AccessLine| {
        line.has(&[("how", "identity"), ("phase", "relay"), ("closed_by", "proxy")])
            && line.get("detail").contains("is revoked")
    };
    wait_for("the connection to be cut", LONG, || {
        Ok(bed.nodes().iter().any(|node| node.access_log().iter().any(cut)))
    })
    .unwrap();
    revoked.proceed().unwrap();
    assert!(revoked.join(SOON).is_err(), "the connection is cut");
    wait_refused(&bed, "n1", "is revoked");
    // Another's goes on.
    other.proceed().unwrap();
    other.stage::<()>(SOON).unwrap();
    wait_answered(&bed, "neighbour", "server");

    // With another certificate all is well again.
    authority.issue(&certificates, "client", 4);
    wait_answered(&bed, "client", "server");

    other.proceed().unwrap();
    other.join(SOON).unwrap();
}

#[test]
fn a_list_that_is_out_of_date_is_no_word_where_there_has_to_be_one() {
    let folder = tempfile::tempdir().unwrap();
    let a_minute_ago = SystemTime::now() - Duration::from_secs(60);
    let (bed, authority, _, list) = with_list("late list", folder.path(), a_minute_ago);
    let _server = echo(bed.pod("server"), PORT);
    let line = wait_refused(&bed, "n1", "out of date");
    println!("{line:?}");
    authority.revoke(&list, &[77], SystemTime::now() + DAY);
    wait_answered(&bed, "client", "server");
}

/// The bed's mesh file with another trust domain.
fn mesh_of(bed: &Bed, domain: &str, file: PathBuf) -> String {
    let text = fs::read_to_string(bed.mesh_file()).unwrap();
    let other = text.replace("cluster.local", domain);
    assert_ne!(text, other);
    fs::write(&file, other).unwrap();
    option("--mesh-file", &file)
}

/// Only for what the name says; nobody else of the mesh.
fn allow(principal: &str) -> String {
    format!(
        "
    name: only-this
    namespace: shop
    scope: namespace
    action: allow
    rules:
      - from:
          - principals: [\"{principal}\"]
"
    )
}

#[test]
fn a_trust_domain_that_gets_another_name_goes_on_node_by_node() {
    let folder = tempfile::tempdir().unwrap();
    let [before, after] = ["before", "after"].map(|name| folder.path().join(name));
    let mut authority = Authority::new("cluster.local");
    authority.issue(&before, "server", 1);
    authority.domain = "mesh.example";
    for (serial, account) in [(2, "client"), (3, "neighbour")] {
        authority.issue(&after, account, serial);
    }
    // The policy knows the client by the old name.
    let bed = world("alias")
        .policy(&allow("cluster.local/ns/shop/sa/client"))
        .build()
        .unwrap();
    let mesh = mesh_of(&bed, "mesh.example", folder.path().join("mesh.yaml"));
    launch(
        bed.node("n1"),
        &[
            &mesh,
            "--trust-domain-alias=cluster.local",
            &option("--certificate-folder", &after),
        ],
    );
    launch(
        bed.node("n2"),
        &[
            "--trust-domain-alias=mesh.example",
            &option("--certificate-folder", &before),
        ],
    );
    let (neighbour, server) = (bed.pod("neighbour"), bed.pod("server"));
    let _server = echo(server, PORT);
    wait_answered(&bed, "client", "server");
    assert!(
        !is_answered(neighbour, server.at(PORT)),
        "the policy names the client alone"
    );
}

#[test]
fn another_trust_domain_vouches_for_its_own_identities_and_no_others() {
    let folder = tempfile::tempdir().unwrap();
    let [ours, theirs, forged] = ["ours", "theirs", "forged"].map(|name| folder.path().join(name));
    let [our_roots, their_roots] = ["ours.pem", "theirs.pem"].map(|name| folder.path().join(name));
    let (home, mut other) = (Authority::new("cluster.local"), Authority::new("other.example"));
    home.issue(&ours, "server", 1);
    for (serial, account) in [(1, "client"), (2, "neighbour")] {
        other.domain = "other.example";
        other.issue(&theirs, account, serial);
        other.domain = "cluster.local";
        other.issue(&forged, account, serial + 10);
    }
    fs::write(&our_roots, home.root.pem()).unwrap();
    fs::write(&their_roots, other.root.pem()).unwrap();
    let bed = world("federation")
        .policy(&allow("other.example/ns/shop/sa/client"))
        .build()
        .unwrap();
    let mesh = mesh_of(&bed, "other.example", folder.path().join("mesh.yaml"));
    let (of_ours, of_theirs) = (
        option("--certificate-folder", &ours),
        option("--certificate-folder", &theirs),
    );
    // For the other mesh, what it dials here is its own by an alias, whose root it knows.
    let (trusts_ours, alias) = (
        option("--trust-bundle", &our_roots),
        "--trust-domain-alias=cluster.local",
    );
    let (client, neighbour, server) = (bed.pod("client"), bed.pod("neighbour"), bed.pod("server"));
    let _server = echo(server, PORT);
    launch(bed.node("n1"), &[&mesh, alias, &of_theirs, &trusts_ours]);
    launch(bed.node("n2"), &[&of_ours]);
    assert!(!is_answered(client, server.at(PORT)), "nobody knows the other domain");
    let unknown = |line: &AccessLine| line.get("how") == "identity" && line.get("detail").contains("other.example");
    bed.node("n2").wait_for_access("who it is not", SOON, unknown).unwrap();

    bed.node("n2").kill();
    let federated = format!("--trust-domain-bundle=other.example={}", their_roots.display());
    launch(bed.node("n2"), &[&of_ours, &federated]);
    wait_answered(&bed, "client", "server");
    let seen = crate::world::ask(client, server.at(PORT));
    // Each log has the names of its own mesh.
    let line = source_line(&bed, client, &seen);
    assert_eq!(
        line.get("destination.identity"),
        "spiffe://other.example/ns/shop/sa/server"
    );
    let known = |line: &AccessLine| line.get("source.identity") == "spiffe://other.example/ns/shop/sa/client";
    bed.node("n2").wait_for_access("who it is", SOON, known).unwrap();
    assert!(
        !is_answered(neighbour, server.at(PORT)),
        "the policy names the client alone"
    );

    // An identity of ours that the other domain's root has signed.
    bed.node("n1").kill();
    launch(
        bed.node("n1"),
        &[&option("--certificate-folder", &forged), &trusts_ours],
    );
    assert!(!is_answered(client, server.at(PORT)), "no root of ours has signed this");
    let forged = |line: &AccessLine| line.get("how") == "identity" && line.get("phase") == "handshake";
    let line = bed
        .node("n2")
        .wait_for_access("what is wrong with it", SOON, forged)
        .unwrap();
    println!("{line:?}");
}
