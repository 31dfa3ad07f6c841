"""GPTQ and AWQ: qweight, qzeros and scales in packed int32."""
