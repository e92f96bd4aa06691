//! What is said over Envoy's and Adit's tunnels.

use std::io::Write;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use adit_tests::bed::Pod;
use adit_tests::net::{self, Digest, Ending, STUCK};

use socket2::SockRef;

use crate::world::LONG;

/// A client and the server that its connection to `to` must reach; the server listens at `at`.
pub(super) struct Pair<'a> {
    pub(super) client: &'a Pod,
    pub(super) to: SocketAddr,
    pub(super) server: &'a Pod,
    pub(super) at: SocketAddr,
}

impl Pair<'_> {
    /// Both send so many bytes at once, which arrive whole on the other side. The client ends its side first: a server
    /// behind Envoy that did so would cut off the client.
    pub(super) fn both_send(&self, bytes: u64) {
        let (at, to) = (self.at, self.to);
        let serving = self
            .server
            .serve(|stage| net::serve_one(stage, at, |stream, _| both_ways(stream, bytes, 1, false)));
        let serving = serving.unwrap();
        let asking = self
            .client
            .spawn(|| both_ways(net::connect(to)?, bytes, 2, true))
            .unwrap();
        let (client_sent, (client_got, client_end)) = asking.join(LONG).unwrap();
        let (server_sent, (server_got, server_end)) = serving.join(LONG).unwrap();
        assert_eq!(
            (&client_got, client_end),
            (&server_sent, Ending::Fin),
            "from server to client"
        );
        assert_eq!(
            (&server_got, server_end),
            (&client_sent, Ending::Fin),
            "from client to server"
        );
        assert_eq!((client_got.bytes, server_got.bytes), (bytes, bytes));
    }

    /// The client ends its side before the server begins to answer.
    pub(super) fn client_ends_first(&self, bytes: u64) {
        let (at, to) = (self.at, self.to);
        let serving = self
            .server
            .serve(|stage| net::serve_one(stage, at, |stream, _| listen_then_talk(stream, bytes)));
        let serving = serving.unwrap();
        let asking = self
            .client
            .spawn(|| talk_then_listen(net::connect(to)?, bytes))
            .unwrap();
        let (sent, (got, end)) = asking.join(LONG).unwrap();
        let ((server_got, server_end), server_sent) = serving.join(LONG).unwrap();
        assert_eq!((server_got, server_end), (sent, Ending::Fin), "the client's side");
        assert_eq!((got, end), (server_sent, Ending::Fin), "the answer");
    }

    /// The server speaks first and ends its side before the client begins to answer.
    pub(super) fn server_ends_first(&self, bytes: u64) {
        let (at, to) = (self.at, self.to);
        let serving = self
            .server
            .serve(|stage| net::serve_one(stage, at, |stream, _| talk_then_listen(stream, bytes)));
        let serving = serving.unwrap();
        let asking = self
            .client
            .spawn(|| listen_then_talk(net::connect(to)?, bytes))
            .unwrap();
        let ((got, end), sent) = asking.join(LONG).unwrap();
        let (server_sent, (server_got, server_end)) = serving.join(LONG).unwrap();
        assert_eq!((got, end), (server_sent, Ending::Fin), "the server's side");
        assert_eq!((server_got, server_end), (sent, Ending::Fin), "the answer");
    }

    /// The server closes at once after its answer, of which the client, who never ends its side, takes little at a
    /// time.
    pub(super) fn server_closes_on_a_slow_reader(&self, bytes: u64) {
        let (at, to) = (self.at, self.to);
        let serving = self.server.serve(|stage| {
            net::serve_one(stage, at, |mut stream, _| {
                let question = net::read_text(&mut stream, 4)?;
                Ok((question, net::send_pattern(&mut stream, bytes, 5)?))
            })
        });
        let serving = serving.unwrap();
        let asking = self.client.spawn(|| {
            let mut stream = net::connect(to)?;
            SockRef::from(&stream).set_recv_buffer_size(64 << 10)?;
            stream.write_all(b"give")?;
            Ok(net::drain_slowly(&mut stream, 16 << 10, Duration::from_millis(1)))
        });
        let got = asking.unwrap().join(LONG).unwrap();
        let (question, sent) = serving.join(LONG).unwrap();
        assert_eq!((question.as_str(), got), ("give", (sent, Ending::Fin)));
    }

    /// The server says what it has to say and closes; a client that goes on sending is told by a reset.
    pub(super) fn server_closes_on_a_talker(&self) {
        let (at, to) = (self.at, self.to);
        let serving = self
            .server
            .serve(|stage| net::serve_one(stage, at, |mut stream, _| Ok(stream.write_all(b"bye")?)));
        let serving = serving.unwrap();
        let asking = self.client.spawn(|| {
            let mut stream = net::connect(to)?;
            let heard = net::read_to_end(&stream);
            let begin = Instant::now();
            while begin.elapsed() < STUCK {
                if let Err(error) = stream.write_all(&[0; 4096]) {
                    return Ok((heard, error.raw_os_error()));
                }
            }
            Ok((heard, None))
        });
        let (heard, error) = asking.unwrap().join(LONG).unwrap();
        assert_eq!(heard, ("bye".to_owned(), Ending::Fin));
        assert!(
            [Some(libc::EPIPE), Some(libc::ECONNRESET)].contains(&error),
            "{error:?}"
        );
        serving.join(LONG).unwrap();
    }
}

type Received = (Digest, Ending);

/// Sends and receives at once; `ends_first` or only after the other side's end.
fn both_ways(mut stream: TcpStream, bytes: u64, seed: u64, ends_first: bool) -> anyhow::Result<(Digest, Received)> {
    let mut writer = stream.try_clone()?;
    let writing = std::thread::spawn(move || {
        let sent = net::send_pattern(&mut writer, bytes, seed)?;
        if ends_first {
            writer.shutdown(Shutdown::Write)?;
        }
        anyhow::Ok(sent)
    });
    let received = net::drain(&mut stream);
    let sent = writing.join().map_err(|_| anyhow::anyhow!("the writer panicked"))??;
    Ok((sent, received))
}

fn talk_then_listen(mut stream: TcpStream, bytes: u64) -> anyhow::Result<(Digest, Received)> {
    let sent = net::send_pattern(&mut stream, bytes, 3)?;
    stream.shutdown(Shutdown::Write)?;
    Ok((sent, net::drain(&mut stream)))
}

fn listen_then_talk(mut stream: TcpStream, bytes: u64) -> anyhow::Result<(Received, Digest)> {
    let received = net::drain(&mut stream);
    let sent = net::send_pattern(&mut stream, bytes, 4)?;
    stream.flush()?;
    Ok((received, sent))
}
