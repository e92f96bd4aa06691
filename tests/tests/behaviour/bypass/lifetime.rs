//! Sockets older than their pod's enrolment.

use std::io::Write;
use std::net::TcpStream;

use adit_tests::bed::{Bed, Capture, Pod, Running};
use adit_tests::net::{self, Seen};
use socket2::{Domain, Socket, Type};

use super::{MARKER, assert_never_in_plaintext, line_in_own_name};
use crate::world::{LONG, PORT, SOON, echo, world};

/// Once the client has come as far as it can without Adit, Adit starts; what the client asks then is captured.
fn goes_on_captured(bed: &Bed, client: &Pod, mut early: Running<Seen>) -> Capture {
    early.stage::<String>(SOON).unwrap();
    bed.start_all().unwrap();
    let capture = bed.capture_link().unwrap();
    early.proceed().unwrap();
    let seen = early.join(LONG).unwrap();
    assert_eq!(seen.text, MARKER);
    line_in_own_name(bed, client, &seen);
    assert_never_in_plaintext(&capture);
    capture
}

#[test]
fn a_socket_made_before_enrolment_and_connected_after_it_is_captured() {
    let bed = world("made before").build().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    let early = client
        .spawn_staged(|stage| {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
            socket.bind(&client.at(0).into())?;
            stage.reached("made")?;
            stage.hold()?;
            net::connect_patiently(&socket, server.at(PORT))?;
            net::ask_on(socket.into(), MARKER)
        })
        .unwrap();
    goes_on_captured(&bed, client, early);
}

#[test]
fn a_connection_that_stood_before_enrolment_goes_on_as_it_was_and_the_next_is_captured() {
    let bed = world("stood before").build().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    let say = |stream: &mut TcpStream, text: &str| -> anyhow::Result<()> {
        stream.write_all(text.as_bytes())?;
        let answer = net::read_text(stream, text.len())?;
        anyhow::ensure!(answer == text, "{answer}");
        Ok(())
    };
    let early = client
        .spawn_staged(|stage| {
            let mut stream = net::connect(server.at(PORT))?;
            say(&mut stream, "before")?;
            stage.reached("connected")?;
            stage.hold()?;
            say(&mut stream, "still there")?;
            // The same socket, connected anew, is a new connection.
            net::disconnect(&stream)?;
            let socket = Socket::from(stream);
            net::connect_patiently(&socket, server.at(PORT))?;
            net::ask_on(socket.into(), MARKER)
        })
        .unwrap();
    let capture = goes_on_captured(&bed, client, early);
    assert!(capture.contains("still there"), "in plaintext, as it began");
}
