package rmq

import (
	"fmt"

	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
	"google.golang.org/grpc"
)

// Dial makes a bare connection to the proxy of cfg, with its TLS and without a signature: for who carries the calls of others, which are
// signed. It dials with the first call. The error is one of configuration. Close the connection.
func Dial(cfg Config) (*grpc.ClientConn, error) {
	cfg.Registerer = nil // the calls are not ours to count
	cfg = cfg.WithDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	l, err := newLink(cfg, v2.ClientType_CLIENT_TYPE_UNSPECIFIED, "")
	if err != nil {
		return nil, err
	}
	conn, err := l.dial(cfg.Endpoints)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", cfg.Endpoints, err)
	}
	return conn, nil
}
