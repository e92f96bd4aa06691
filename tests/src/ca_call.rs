//! A caller of the CA that shares no code with Adit: curl over HTTP/2, the messages encoded by hand.

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, bail, ensure};

use crate::bed::{Bed, Node};

/// gRPC's status for a caller who may not do what it asks.
pub const PERMISSION_DENIED: u32 = 7;
/// gRPC's status for a caller who is not who it says.
pub const UNAUTHENTICATED: u32 = 16;
/// gRPC's status for what may be tried again as it is.
pub const UNAVAILABLE: u32 = 14;
/// gRPC's status for a request that makes no sense.
pub const INVALID_ARGUMENT: u32 = 3;

/// A call of `CreateCertificate`.
#[derive(Debug, Clone, Default)]
pub struct CaCall {
    /// The bearer token, if one is sent.
    pub token: Option<String>,
    /// The certificate signing request, PEM.
    pub csr: String,
    /// The identity asked for, in the metadata `ImpersonatedIdentity`, if it is sent.
    pub identity: Option<String>,
    /// The lifetime asked for, in seconds.
    pub seconds: u64,
}

/// A CA in a cluster, and how to reach it.
#[derive(Debug, Clone)]
pub struct CaTarget {
    /// The name in its certificate.
    pub name: String,
    /// Where it is.
    pub address: SocketAddr,
    /// The root of its certificate, PEM.
    pub root: String,
}

/// What the CA answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaAnswer {
    /// gRPC's status; 0 is success.
    pub status: u32,
    /// gRPC's message.
    pub message: String,
    /// The chain, as the strings it came in.
    pub chain: Vec<String>,
}

impl CaCall {
    /// Makes the call from the network namespace of `node`.
    pub fn send(&self, bed: &Bed, node: &Node) -> anyhow::Result<CaAnswer> {
        let dir = tempfile::tempdir_in(bed.dir()).context("make a folder for the call")?;
        let settings = bed.ca_settings();
        let mut curl = Command::new("curl");
        curl.arg("--cacert").arg(settings.root());
        let listen = settings.listen.to_string();
        node.inside(|| self.run(curl, &listen, dir.path()))?
    }

    /// Makes the call from a network namespace.
    pub fn send_from(&self, netns: &Path, to: &CaTarget) -> anyhow::Result<CaAnswer> {
        let dir = tempfile::tempdir().context("make a folder for the call")?;
        let root = dir.path().join("root.pem");
        fs::write(&root, &to.root)?;
        let (name, port) = (&to.name, to.address.port());
        let mut curl = Command::new("nsenter");
        curl.arg(format!("--net={}", netns.display())).args([
            "curl",
            "--connect-to",
            &format!("{name}:{port}:{}", to.address),
        ]);
        curl.arg("--cacert").arg(&root);
        self.run(curl, &format!("{name}:{port}"), dir.path())
    }

    /// Has curl make the call, with files in `dir`.
    fn run(&self, mut curl: Command, authority: &str, dir: &Path) -> anyhow::Result<CaAnswer> {
        let [request, headers, body] = ["request", "headers", "body"].map(|name| dir.join(name));
        fs::write(&request, framed(&self.encode()))?;
        fs::write(&body, "")?;
        curl.args(["--silent", "--show-error", "--http2", "--max-time", "10"]);
        curl.arg("--dump-header").arg(&headers).arg("--output").arg(&body);
        curl.args(["--header", "content-type: application/grpc", "--header", "te: trailers"]);
        if let Some(token) = &self.token {
            curl.args(["--header", &format!("authorization: Bearer {token}")]);
        }
        curl.arg("--data-binary").arg(format!("@{}", request.display()));
        curl.arg(format!(
            "https://{authority}/istio.v1.auth.IstioCertificateService/CreateCertificate"
        ));
        let output = curl.stdin(Stdio::null()).output().context("start curl")?;
        ensure!(
            output.status.success(),
            "curl: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        parse(
            &fs::read_to_string(&headers).context("read the answer's head")?,
            &fs::read(&body)?,
        )
    }

    fn encode(&self) -> Vec<u8> {
        let mut message = field(1, self.csr.as_bytes());
        if self.seconds > 0 {
            message.push(3 << 3);
            message.extend(varint(self.seconds));
        }
        if let Some(identity) = &self.identity {
            // Struct { fields: { "ImpersonatedIdentity": Value { string_value } } }
            let value = field(3, identity.as_bytes());
            let entry = [field(1, b"ImpersonatedIdentity"), field(2, &value)].concat();
            message.extend(field(4, &field(1, &entry)));
        }
        message
    }
}

/// Makes a key and a certificate signing request for `identity` with OpenSSL. The key is thrown away.
pub fn csr(identity: &str) -> anyhow::Result<String> {
    let names = format!("subjectAltName=critical,URI:{identity}");
    openssl_req(&["-new", "-subj", "/", "-keyout", "/dev/null", "-addext", &names])
}

/// `openssl req` with a new key, and what it says on standard output.
pub fn openssl_req(arguments: &[&str]) -> anyhow::Result<String> {
    let output = Command::new("openssl")
        .args(["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"])
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .context("start openssl")?;
    ensure!(
        output.status.success(),
        "openssl req: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// What OpenSSL says of a certificate in PEM: its text form.
pub fn certificate_text(pem: &str, dir: &Path) -> anyhow::Result<String> {
    let file = dir.join("certificate.pem");
    fs::write(&file, pem)?;
    let output = Command::new("openssl")
        .args(["x509", "-noout", "-text", "-in"])
        .arg(&file)
        .output()?;
    ensure!(
        output.status.success(),
        "openssl x509: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A length-delimited field of a protobuf message.
fn field(number: u8, content: &[u8]) -> Vec<u8> {
    let mut bytes = vec![number << 3 | 2];
    bytes.extend(varint(content.len() as u64));
    bytes.extend(content);
    bytes
}

fn varint(mut number: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while number >= 0x80 {
        bytes.push(0x80 | (number & 0x7f) as u8);
        number >>= 7;
    }
    bytes.push(number as u8);
    bytes
}

/// gRPC's frame: not compressed, length, message.
fn framed(message: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0];
    bytes.extend((message.len() as u32).to_be_bytes());
    bytes.extend(message);
    bytes
}

fn parse(headers: &str, body: &[u8]) -> anyhow::Result<CaAnswer> {
    let fields: BTreeMap<String, &str> = headers
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim()))
        .collect();
    let status = fields
        .get("grpc-status")
        .with_context(|| format!("an answer without grpc-status:\n{headers}"))?;
    let message = fields.get("grpc-message").copied().unwrap_or_default();
    Ok(CaAnswer {
        status: status.parse().context("grpc-status")?,
        message: percent_decoded(message),
        chain: if body.is_empty() {
            Vec::new()
        } else {
            parse_chain(body)?
        },
    })
}

fn parse_chain(body: &[u8]) -> anyhow::Result<Vec<String>> {
    let mut rest = body.get(5..).context("an answer shorter than a gRPC frame's head")?;
    let mut chain = Vec::new();
    while let Some((tag, after)) = rest.split_first() {
        ensure!(*tag == (1 << 3 | 2), "an unexpected field in the answer: tag {tag}");
        let (length, after) = read_varint(after)?;
        let length = usize::try_from(length)?;
        let Some(content) = after.get(..length) else {
            bail!("an answer cut short")
        };
        chain.push(String::from_utf8(content.to_vec()).context("a certificate that is not text")?);
        rest = &after[length..];
    }
    Ok(chain)
}

fn read_varint(bytes: &[u8]) -> anyhow::Result<(u64, &[u8])> {
    let mut number = 0;
    for (index, byte) in bytes.iter().enumerate().take(10) {
        number |= u64::from(byte & 0x7f) << (7 * index);
        if byte & 0x80 == 0 {
            return Ok((number, &bytes[index + 1..]));
        }
    }
    bail!("a number that does not end")
}

fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let digits = after.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) if *first == b'%' => {
                bytes.push(byte);
                rest = &after[2..];
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_encoded_as_protobuf_does() {
        let call = CaCall {
            csr: "c".repeat(200),
            identity: Some("id".to_owned()),
            seconds: 300,
            ..CaCall::default()
        };
        let bytes = call.encode();
        assert_eq!(bytes[..3], [0x0a, 0xc8, 0x01], "a string of 200 bytes in field 1");
        assert_eq!(bytes[203..206], [0x18, 0xac, 0x02], "300 in field 3");
        assert_eq!(bytes[206..210], [0x22, 30, 0x0a, 28]);
    }

    #[test]
    fn an_answer_is_read_with_its_trailers() {
        let body = framed(&[field(1, b"leaf"), field(1, b"root")].concat());
        let answer = parse("HTTP/2 200 \r\n\r\ngrpc-status: 0\r\n", &body).unwrap();
        assert_eq!(
            (answer.status, answer.chain),
            (0, vec!["leaf".to_owned(), "root".to_owned()])
        );
        let refused = parse("HTTP/2 200 \r\ngrpc-status: 7\r\ngrpc-message: not%20yours\r\n", b"").unwrap();
        assert_eq!(
            (refused.status, refused.message.as_str()),
            (PERMISSION_DENIED, "not yours")
        );
    }

    #[test]
    fn openssl_makes_a_request() {
        assert!(
            csr("spiffe://cluster.local/ns/a/sa/b")
                .unwrap()
                .contains("BEGIN CERTIFICATE REQUEST")
        );
    }
}
