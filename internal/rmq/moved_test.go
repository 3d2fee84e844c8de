package rmq

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"google.golang.org/grpc/resolver/dns"

	"github.com/lapse-orders/lapse/lapsetest"
)

// case MQ-18: the endpoint comes back on another address behind the same name.
func TestBrokerThatMovedToAnotherAddressIsUsedAgain(t *testing.T) {
	t.Parallel()
	runChild(t, "moved")
}

func init() { children["moved"] = childMoved }

// childMoved has a process of its own since it replaces the resolver of the whole process.
func childMoved() (err error) {
	const host = "broker.lapse.test"
	var address atomic.Value
	address.Store([4]byte{127, 0, 0, 1})
	server, err := serveNames(host, &address)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Close()) }()
	net.DefaultResolver = &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "udp", server.LocalAddr().String())
	}}
	if os.Getenv("LAPSE_TEST_FULL") == "" {
		// gRPC asks again for a name after 30 s at the earliest; the long run waits for that.
		dns.SetMinResolutionInterval(time.Second)
	}

	first, err := lapsetest.New()
	if err != nil {
		return err
	}
	defer first.Close()
	first.CreateTopic("t", lapsetest.Delay, 1)
	first.CreateGroup("g", 16)
	_, port, err := net.SplitHostPort(first.Endpoint())
	if err != nil {
		return err
	}
	cfg := Config{Endpoints: net.JoinHostPort(host, port), TLS: TLS{Disabled: true}, Logger: childLog(os.Stderr)}
	p, c, err := openBoth(cfg, "g", "t")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	defer cancel()
	defer func() { err = errors.Join(err, closeBoth(ctx, p, c)) }()

	first.Close()
	second, err := lapsetest.New(lapsetest.WithListenAddress("127.0.0.2:" + port))
	if err != nil {
		return err
	}
	defer second.Close()
	second.CreateTopic("t", lapsetest.Delay, 1)
	second.CreateGroup("g", 16)
	address.Store([4]byte{127, 0, 0, 2})
	moved := time.Now()

	for {
		if _, err := p.Send(ctx, Message{Topic: "t", Body: []byte("x"), DeliverAt: time.Now()}); err == nil {
			break
		}
		if ctx.Err() != nil {
			return fmt.Errorf("nothing could be sent to the new address: %w", p.Ready())
		}
		if !poll100(ctx, func() bool { return p.Ready() == nil }) {
			continue
		}
	}
	for {
		ds, err := c.Receive(ctx, 1, 10*time.Second)
		if err == nil && len(ds) == 1 {
			fmt.Printf("used again %s after the move\n", time.Since(moved).Round(10*time.Millisecond))
			return c.Ack(ctx, ds[0])
		}
		if ctx.Err() != nil {
			return fmt.Errorf("nothing was received from the new address: %w", err)
		}
		poll100(ctx, func() bool { return c.Ready() == nil })
	}
}

// serveNames answers questions for one name with the address that it has at the time, not to be kept.
func serveNames(host string, address *atomic.Value) (net.PacketConn, error) {
	server, err := (&net.ListenConfig{}).ListenPacket(context.Background(), "udp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	go func() { // ended by Close
		buf := make([]byte, 1500)
		for {
			n, from, err := server.ReadFrom(buf)
			if err != nil {
				return
			}
			var m dnsmessage.Message
			if m.Unpack(buf[:n]) != nil || len(m.Questions) != 1 {
				continue
			}
			q := m.Questions[0]
			reply := dnsmessage.Message{Header: dnsmessage.Header{ID: m.ID, Response: true, RecursionAvailable: true}, Questions: m.Questions}
			switch {
			case q.Name.String() != host+".":
				reply.RCode = dnsmessage.RCodeNameError
			case q.Type == dnsmessage.TypeA:
				reply.Answers = []dnsmessage.Resource{{
					Header: dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class},
					Body:   &dnsmessage.AResource{A: address.Load().([4]byte)},
				}}
			}
			if packed, err := reply.Pack(); err == nil {
				_, _ = server.WriteTo(packed, from) // whoever asked asks again
			}
		}
	}()
	return server, nil
}
