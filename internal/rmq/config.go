package rmq

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Types of a topic, for Config.TopicType.
const (
	TopicDelay  = "DELAY"  // timed messages
	TopicNormal = "NORMAL" // messages without a delivery time
	TopicAny    = "ANY"    // do not check
)

const (
	defaultRequestTimeout = 3 * time.Second

	// The shortest await that the proxy takes is five seconds of deadline left
	// (40018 otherwise). A longer one would only make a shutdown slower, which has
	// to let the last poll end.
	awaitDuration = 5 * time.Second

	// The proxy's limit for one Receive; more is silently cut down to it.
	maxBatch = 32

	// The proxy's limits for the invisible time of a Receive (40011 otherwise).
	minInvisible = 10 * time.Second
	maxInvisible = 12 * time.Hour
)

// Config says how to reach RocketMQ. The zero value of every field but Endpoints
// is useful.
type Config struct {
	// Endpoints is host:port of a proxy, or several separated by semicolons.
	// Required.
	Endpoints string
	// Namespace of topics and groups. Default: none.
	Namespace string
	// AccessKey and SecretKey are the credentials of ACL 2.0, both or neither.
	// Default: calls are not signed.
	AccessKey, SecretKey string
	// SecurityToken accompanies temporary credentials. Default: none.
	SecurityToken string
	// TLS of all connections. Default: on, verified against the system's roots.
	TLS TLS
	// RequestTimeout bounds each request other than a Receive, whatever the
	// context of the call allows. At least 500 ms. Default: 3 s.
	RequestTimeout time.Duration
	// TopicType is the type that the topics must have: TopicDelay, TopicNormal or
	// TopicAny. Topics whose names start with a % belong to the system and are not
	// checked. Default: TopicDelay.
	TopicType string
	// Logger gets what happens to connections, and at debug level every refused
	// call; never a body. Default: nil, silent.
	Logger *slog.Logger
	// Registerer gets the metrics lapse_rocketmq_*. Several Producers and Consumers
	// may share one. Default: nil, off.
	Registerer prometheus.Registerer
}

// TLS is the transport security of a Config.
type TLS struct {
	// Disabled makes connections plaintext. Default: false. It is not called
	// Enabled so that a forgotten TLS section means security, not its absence.
	Disabled bool
	// CAFile is a PEM file of the authorities to trust. Default: the system's.
	CAFile string
	// ServerName is the name to verify. Default: the host of the endpoint.
	ServerName string
	// InsecureSkipVerify accepts any certificate. Default: false.
	InsecureSkipVerify bool
	// CertFile and KeyFile are the client's certificate and key (PEM), both or
	// neither. Default: none is shown.
	CertFile, KeyFile string
}

// WithDefaults gives the configuration with every zero field that has a default
// replaced by it.
func (c Config) WithDefaults() Config {
	c.RequestTimeout = cmp.Or(c.RequestTimeout, defaultRequestTimeout)
	c.TopicType = cmp.Or(strings.ToUpper(c.TopicType), TopicDelay)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

func (c Config) validate() error {
	var errs []error
	if _, err := parseEndpoints(c.Endpoints); err != nil {
		errs = append(errs, err)
	}
	if (c.AccessKey == "") != (c.SecretKey == "") {
		errs = append(errs, errors.New("access key and secret key: give both or neither"))
	}
	if c.RequestTimeout < 500*time.Millisecond {
		errs = append(errs, fmt.Errorf("request timeout %s: must be at least 500ms", c.RequestTimeout))
	}
	if !slices.Contains([]string{TopicDelay, TopicNormal, TopicAny}, c.TopicType) {
		errs = append(errs, fmt.Errorf("topic type %q: must be DELAY, NORMAL or ANY", c.TopicType))
	}
	return errors.Join(errs...)
}

func validateTopics(topics []string) error {
	if len(topics) == 0 {
		// Without a topic the client's Start waits for ever (client.go:598).
		return errors.New("no topic: name at least one")
	}
	for _, t := range topics {
		if t == "" || strings.ContainsAny(t, " \t\r\n") {
			return fmt.Errorf("topic %q: must not be empty or contain blanks", t)
		}
	}
	return nil
}

// parseEndpoints splits "host:port;host:port" and checks each part.
func parseEndpoints(s string) ([]string, error) {
	var out []string
	for part := range strings.SplitSeq(strings.TrimPrefix(s, "ip:///"), ";") {
		part = strings.TrimSpace(part)
		if part == "" {
			continue
		}
		host, port, err := net.SplitHostPort(part)
		if err != nil {
			return nil, fmt.Errorf("endpoint %q: must be host:port: %w", part, err)
		}
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 || host == "" {
			return nil, fmt.Errorf("endpoint %q: must be host:port with a port from 1 to 65535", part)
		}
		out = append(out, net.JoinHostPort(host, port))
	}
	if len(out) == 0 {
		return nil, errors.New("no endpoint: give host:port of a RocketMQ 5 proxy")
	}
	return out, nil
}

// clientConfig reads the files; nil means plaintext.
func (t TLS) clientConfig() (*tls.Config, error) {
	if t.Disabled {
		return nil, nil
	}
	if (t.CertFile == "") != (t.KeyFile == "") {
		return nil, errors.New("tls: client certificate and key: give both or neither")
	}
	conf := &tls.Config{
		MinVersion:         tls.VersionTLS12,
		ServerName:         t.ServerName,
		InsecureSkipVerify: t.InsecureSkipVerify, //nolint:gosec // only when the operator asks for it by name
	}
	if t.CAFile != "" {
		pem, err := os.ReadFile(t.CAFile)
		if err != nil {
			return nil, fmt.Errorf("tls: read the authorities: %w", err)
		}
		conf.RootCAs = x509.NewCertPool()
		if !conf.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("tls: %s holds no PEM certificate", t.CAFile)
		}
	}
	if t.CertFile != "" {
		cert, err := tls.LoadX509KeyPair(t.CertFile, t.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("tls: read the client certificate: %w", err)
		}
		conf.Certificates = []tls.Certificate{cert}
	}
	return conf, nil
}
