//! The tunnels' port, dialled by somebody with a TLS client of his own.

use adit_tests::bed::{AccessLine, Bed, Pod};
use adit_tests::ca_call::openssl_req;
use adit_tests::net;

use super::{line_in_own_name, lines_about};
use crate::world::{PORT, SOON, ask_name, echo, name, world};

/// What OpenSSL's client says of a handshake with the pod's port 15008, after which it sends a line.
fn shake_hands(from: &Pod, to: &Pod, certificate: Option<&str>) -> String {
    let mut script = format!(
        "(sleep 0.3; echo hello; sleep 0.2) | timeout 5 openssl s_client -connect {} -alpn h2",
        to.at(15_008)
    );
    if let Some(path) = certificate {
        script += &format!(" -cert {path} -key {path}");
    }
    from.output("sh", &["-c", &format!("{script} 2>&1; true")]).unwrap()
}

/// A certificate that says it is this identity, by an authority of the caller's own.
fn forged(bed: &Bed, identity: &str) -> String {
    let path = bed.dir().join("forged.pem").display().to_string();
    let names = format!("subjectAltName=critical,URI:{identity}");
    let certificate = openssl_req(&["-x509", "-subj", "/", "-days", "1", "-keyout", &path, "-addext", &names]).unwrap();
    let key = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, key + &certificate).unwrap();
    path
}

#[test]
fn a_tunnel_without_a_certificate_or_with_a_forged_one_is_refused() {
    let bed = world("forged").start().unwrap();
    let (outsider, server) = (bed.pod("outsider"), bed.pod("server"));
    let _server = echo(server, PORT);
    let forged = forged(&bed, &bed.pod("client").identity());
    for certificate in [None, Some(forged.as_str())] {
        let said = shake_hands(outsider, server, certificate);
        assert!(said.contains("alert"), "{said}");
    }
    let refused = |line: &AccessLine| line.has(&[("how", "identity"), ("source.identity", "")]);
    bed.node("n2").wait_for_access("of the refusal", SOON, refused).unwrap();
    let lines = lines_about(&bed, server);
    assert!(lines.iter().all(refused), "{lines:?}");
}

#[test]
fn a_pod_of_the_mesh_that_dials_the_tunnels_port_of_another_is_carried_as_to_any_port() {
    let bed = world("15008 from within").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    // What it says never gets to the other's proxy: in the tunnel its peer is the application at this port.
    let said = shake_hands(client, server, None);
    assert!(!said.contains("Server certificate"), "{said}");
    let _server = name(server, 15_008);
    assert_eq!(ask_name(client, server.at(15_008)).unwrap(), "server");
    let _echo = echo(server, PORT);
    let seen = client.run(|| net::ask(server.at(PORT), "as ever")).unwrap();
    line_in_own_name(&bed, client, &seen);
}
